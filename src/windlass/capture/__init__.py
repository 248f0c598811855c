"""Capture: from a chain of layers to a graph of what one step computes."""
