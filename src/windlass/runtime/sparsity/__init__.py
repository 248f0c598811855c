"""Masks that change during a run, and checkpoints whose layers become sparser or dense."""
