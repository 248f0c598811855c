"""Proves that a plan computes what a plain run does, and measures plans drawn at random."""

import lazy_loader

# Each command needs a part of the room only.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
