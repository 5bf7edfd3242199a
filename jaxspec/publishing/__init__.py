"""Export models, write their cards, and push them to the hub."""
