"""Shape a block of drafts: chains and trees, mixtures of sources, and learned weights."""
