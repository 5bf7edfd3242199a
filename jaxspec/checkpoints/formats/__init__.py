"""Read weights from safetensors, PyTorch's .bin and GGUF, without their frameworks."""
