"""Make tables from recorded answers, without a model."""
