"""Data: the embedded world, dataset builders, benchmark registry, prompts and loaders."""
