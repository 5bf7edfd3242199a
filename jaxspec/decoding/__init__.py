"""Drafting, verification in one compiled loop, and the engine around it."""
