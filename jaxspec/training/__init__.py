"""Train drafts: losses, the training step and the loop around it (needs the `train` extra)."""
