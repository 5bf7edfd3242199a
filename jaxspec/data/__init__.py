"""Data: picturebook, the benchmarks, your own files, training data, images and prompts."""
