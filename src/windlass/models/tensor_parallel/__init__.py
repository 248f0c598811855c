"""Tensor parallelism with sequence parallelism, in one dimension or in a grid of ranks.

Sharding rules say how each module of a layer is split; from them follow each rank's shard of the
parameters, the sharded copy of the layer that it runs, and the collectives between the ranks.
"""
