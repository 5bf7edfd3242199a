"""Data: picturebook, the benchmarks, your own files, training data, and images."""
