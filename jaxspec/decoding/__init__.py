"""Draft and verify in one compiled loop."""
