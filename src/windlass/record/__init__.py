"""Finds runs again: the catalogue of all runs, its queries, and how stores merge."""
