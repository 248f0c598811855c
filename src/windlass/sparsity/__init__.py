"""Sparse weights: masks, layers that store only what is kept, their kernels and schedules."""

import lazy_loader

# Importing torch takes over a second: what needs it loads when a name is first asked for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
