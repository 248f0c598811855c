"""Makes linear layers of a model sparse, with random masks or with those of a file."""
