"""The trainer's loop: its step, how it is measured, and how a run stops and goes on."""
