"""The training loop and what is attached to it."""
