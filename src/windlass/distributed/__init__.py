"""Runs on several hosts: their scripts, ranks and recovery."""

import lazy_loader

# Each command needs a part of the room only.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
