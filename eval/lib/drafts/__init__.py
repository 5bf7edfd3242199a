"""Share what the tables of drafts need: presets, loading, comparison, figures, pages."""
