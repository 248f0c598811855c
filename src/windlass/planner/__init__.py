"""Planner: chooses the fastest plan that fits, and advises when nothing fits.

`choose` is the entry point. `space` enumerates the plans that a request leaves open, `search` finds
the fastest ones that fit in memory, `advice` says what would make a request fit, `explain` puts a
result into sentences, and `downscale` makes a small plan of the same structure for a rehearsal.
"""
