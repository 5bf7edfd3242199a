"""Loop over training steps, measure them, and let a run stop and go on."""
