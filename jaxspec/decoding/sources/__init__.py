"""Score next tokens for the drafter: one file a kind of draft, behind `source.py`'s protocol."""
