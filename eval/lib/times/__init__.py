"""Times of passes and programs."""
