"""Read requests into batches, and decode these."""
