"""Plan space: the plans that a request leaves open, single-device, distributed and in phases."""
