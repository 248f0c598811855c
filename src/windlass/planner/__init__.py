"""Planner: chooses the fastest plan that fits, and advises when nothing fits.

`choose` is the entry point. `space` enumerates the plans that a request leaves open, `search` finds
the fastest ones that fit in memory, `advice` says what would make a request fit, `explain` puts a
result into sentences, and `downscale` makes a small plan of the same structure for a rehearsal.
"""

import lazy_loader

# A plan that is kept is shown without the search, and without numpy.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
