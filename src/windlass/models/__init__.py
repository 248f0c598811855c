"""Models as stacks of layers: named models of the catalog, user files, and tensor parallelism.

A model is built as a `LayerStack` (`build_layer_stack`), on the meta device or with weights drawn
from a seed. `TransformerConfig` and the catalog answer without importing torch.
"""

import lazy_loader

# Importing torch takes over a second: what needs it loads when a name is first asked for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
