"""Writers of runs into other trackers."""
