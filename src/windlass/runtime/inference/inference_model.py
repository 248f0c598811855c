"""A trained model whose weights stay in memory, as a function from tokens to logits."""

import torch
from torch import Tensor

from windlass.models import LayerStack
from windlass.runtime.checkpoint.checkpoint import Checkpoint, load_checkpoint
from windlass.runtime.layer_templates import layer_templates
from windlass.runtime.parameters import resident_layers
from windlass.schema import Precision


class InferenceModel:
    """A model with the weights of a checkpoint, without dropout and without gradients.

    Args:
        stack: the model that the checkpoint belongs to.
        checkpoint: checkpoint to load the weights from, its shards merged.
        precision: precision that layers compute in.
        device: torch device name.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """

    def __init__(
        self,
        stack: LayerStack,
        checkpoint: Checkpoint,
        *,
        precision: Precision = "float32",
        device: str = "cpu",
    ) -> None:
        self.max_sequence = stack.max_sequence
        """Longest sequence that it reads; None if it sets no limit."""
        self._device = torch.device(device)
        self._layers = resident_layers(stack, seed=0, precision=precision, device=self._device)
        load_checkpoint(checkpoint, self._layers, moments=False)
        self._templates = layer_templates(stack, compiled=False)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits `Float[b s v]` for tokens `Int[b s]`, which may be on any device."""
        x = tokens.to(self._device)
        for layer, template in zip(self._layers, self._templates, strict=True):
            x = template.raw_output(layer.weights, layer.buffers, x)
        return x
