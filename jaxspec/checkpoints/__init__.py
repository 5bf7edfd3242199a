"""Checkpoints: reading and writing models in Hugging Face layout, and their processors."""
