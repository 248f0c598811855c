"""The record beyond one folder: a server, merges, other sites and other trackers."""
