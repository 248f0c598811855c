"""What a run needs before it begins: its request, model, machine, data and plan."""

import lazy_loader

# Each command needs a part of the room only.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
