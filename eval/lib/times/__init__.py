"""Time passes and programs."""
