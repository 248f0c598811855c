"""Models as stacks of layers: named models of the catalog, user files, and tensor parallelism.

A model is built as a `LayerStack` (`build_layer_stack`), on the meta device or with weights drawn
from a seed. `TransformerConfig` and the catalog answer without importing torch.
"""
