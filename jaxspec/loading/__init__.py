"""Checkpoints with tokeniser and image processor, their images as arrays, and pairs of them."""
