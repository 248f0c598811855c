"""Finds what one step of a model computes, as a graph of ops, without allocating its weights.

Layers run forward and backward on fake tensors; the recorded calls become ops of an eager or a
compiled layer, with bytes and FLOP as polynomials of micro-batch and sequence. Graphs are kept in a
cache, which answers without importing torch. For transformers of the catalog the same graph is
computed without torch (`analytic`).
"""

import lazy_loader

# Importing torch takes over a second: what needs it loads when a name is first asked for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
