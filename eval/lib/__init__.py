"""What the scripts beside this folder share: it is imported, and never run."""
