"""Models as pure functions of (parameters, inputs, cache): families, decoders, towers, heads."""
