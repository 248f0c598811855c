"""Choices that follow from a key alone: orders, shares of sources, masks."""
