"""Windlass: train a large model on whatever machine you have."""
