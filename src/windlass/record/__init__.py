"""Finds runs again: the catalogue of all runs, its queries, and how stores merge."""

import lazy_loader

# Most commands need a part of the room only, and answer at once.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
