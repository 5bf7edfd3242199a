"""Read and write models in Hugging Face layout, and their processors."""
