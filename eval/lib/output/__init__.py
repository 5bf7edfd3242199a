"""Results, tables and bars as files."""
