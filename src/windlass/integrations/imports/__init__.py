"""Readers of the files of other trackers."""
