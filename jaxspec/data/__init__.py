"""Read benchmarks, your own files, training data, and images."""
