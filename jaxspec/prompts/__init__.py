"""Prompts: text and images as token ids, and as the rows that models are shown."""
