"""PyTorch's own distributed stack as an engine.

DeviceMesh names the ranks, FSDP2 shards and replicates, `torch.distributed.pipelining` runs the
stages, `torch.optim` updates, `torch.utils.checkpoint` recomputes. The layers, their weights, the
data, dropout and the loss are the own runtime's, so that losses and weights are equal.

Tensor parallelism runs the layers of `windlass.models.shard_layer` on the mesh's `tp` group, not
DTensor styles: those have no form of several parts fused in one weight (`column in 4:1:1`, as the
query, key and value of grouped heads), of an uneven vocabulary, and of dropout whose mask must not
depend on the layout. No GPU has run this engine yet.
"""

from windlass.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
