"""Make prompts of text and images: token ids, and the rows that models read."""
