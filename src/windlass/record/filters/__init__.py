"""Filters of runs: their grammar, and what they are in SQL."""
