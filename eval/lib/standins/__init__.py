"""Stand in for models: recorded answers, random weights."""
