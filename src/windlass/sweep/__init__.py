"""Searches settings with many runs that are packed on one machine."""
