"""Figures of plans and runs as SVG, and their conversion to PNG."""
