"""What the tables of drafts share: presets, loading, comparison, figures, pages."""
