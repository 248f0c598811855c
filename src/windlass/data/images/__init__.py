"""Images with classes: found, scaled to one size, and written to memory-mapped files once."""
