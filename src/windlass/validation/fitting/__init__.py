"""Fits the constants of the laws to published runs."""
