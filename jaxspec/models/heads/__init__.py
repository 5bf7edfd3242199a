"""Compute draft heads, one file a kind: layers that read the target, and their training pass."""
