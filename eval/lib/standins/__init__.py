"""Stand-ins for models: recorded answers, random weights."""
