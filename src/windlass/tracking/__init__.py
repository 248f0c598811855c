"""The run folder and its journal: created, locked, appended to, listed and loaded again."""

import lazy_loader

# Series need numpy; what only lists or locks a folder does without.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
