"""Define draft heads: what they are, compute and store, each kind in a file of `kinds`."""
