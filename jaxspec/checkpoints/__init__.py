"""Checkpoints: models in Hugging Face layout, in and out, and the processors that lie beside them."""
