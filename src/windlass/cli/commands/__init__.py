"""One module for each command of `windlass`, or for a few that belong together."""
