"""The Python interface: a function for each command, which returns values instead of printing.

It joins planning, training, verification and reports, and computes nothing itself.
"""

import lazy_loader

# Most commands need a part of the room only, and answer at once.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
