"""Draft heads, one file a kind: decoder layers that read the target, and their training pass."""
