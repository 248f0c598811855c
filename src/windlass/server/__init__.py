"""Serves the record as a page and an API."""
