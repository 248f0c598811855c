"""Captures what one step of a model computes, as a graph of ops, without allocating its weights.

Layers run forward and backward on fake tensors; the recorded calls become ops of an eager or a
compiled layer, with bytes and FLOP as polynomials of micro-batch and sequence. Graphs are kept in a
cache, which answers without importing torch.
"""
