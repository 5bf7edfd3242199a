"""Loop over training steps: how they are measured, and how a run stops and goes on."""
