"""Tables from recorded answers, without a model."""
