"""Keeps weights, optimizer state, gradients and activations outside of device memory.

Offload tiers are host memory and files on a disk. Layers of one phase at a time are streamed into
device memory by transfers that overlap with computation, and optimizer updates pass through a few
staging buffers.
"""
