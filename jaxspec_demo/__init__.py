"""Show jaxspec at work: `jaxspec demo`, and the small models that it and the tests answer with."""

from pathlib import Path

ASSETS = Path(__file__).resolve().parent
"""Folder of a drawn page and of shipped models, each pair in its own folder."""
