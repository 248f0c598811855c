"""torch_ext."""
