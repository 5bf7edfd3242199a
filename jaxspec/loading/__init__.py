"""Load checkpoints with tokeniser and image processor, and compare pairs of them."""
