"""Define the models that read images: their towers, projectors, and readers of pictures."""
