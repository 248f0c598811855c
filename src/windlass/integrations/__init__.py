"""Exchanges runs with other trackers and training loops."""
