"""Compute models as pure functions of (parameters, inputs, cache)."""
