"""Metrics, tables and figures from decode statistics."""
