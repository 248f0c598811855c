"""Windlass: train a large model on whatever machine you have."""

__version__ = "0.1.0"
