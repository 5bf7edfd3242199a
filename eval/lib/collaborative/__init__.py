"""Share what the collaborative tables need."""
