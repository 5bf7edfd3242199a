"""Sources of drafts: one file a kind, behind the protocol of `source.py`."""
