"""Write results, tables and bars as files."""
