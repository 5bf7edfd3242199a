"""Formats of weight files: safetensors, PyTorch's .bin and GGUF, read without their frameworks."""
