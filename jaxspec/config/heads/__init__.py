"""Configure draft heads, one file a kind: what they read of their target, and its check."""
