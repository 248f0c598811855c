"""A trained model whose weights stay in memory, as a function from tokens to logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.models import Attention, LayerStack, can_cache_tokens, set_first_position
from windlass.runtime.checkpoint.checkpoint import Checkpoint, load_checkpoint
from windlass.runtime.inference.kv_cache import KeyValueCaches
from windlass.runtime.layer_templates import layer_templates
from windlass.runtime.parameters import resident_layers
from windlass.schema import Precision


class InferenceModel:
    """A model with the weights of a checkpoint, without dropout and without gradients.

    Args:
        stack: the model that the checkpoint belongs to.
        checkpoint: checkpoint to load the weights from, its shards merged; None keeps those that
            the model begins with.
        precision: precision that layers compute in.
        device: torch device name.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """

    def __init__(
        self,
        stack: LayerStack,
        checkpoint: Checkpoint | None,
        *,
        precision: Precision = "float32",
        device: str = "cpu",
    ) -> None:
        self.max_sequence = stack.max_sequence
        """Longest sequence that it reads; None if it sets no limit."""
        self._device = torch.device(device)
        self._layers = resident_layers(stack, seed=0, precision=precision, device=self._device)
        if checkpoint is not None:
            load_checkpoint(checkpoint, self._layers, moments=False)
        self._templates = layer_templates(stack, compiled=False)
        self._caches_tokens = can_cache_tokens(stack.layers)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits `Float[b s v]` for tokens `Int[b s]`, which may be on any device."""
        x = tokens.to(self._device)
        for layer, template in zip(self._layers, self._templates, strict=True):
            x = template.raw_output(layer.weights, layer.buffers, x)
        return x

    def new_caches(self) -> KeyValueCaches | None:
        """Caches for one text; None for a model of the user's own, which may look anywhere."""
        if not self._caches_tokens:
            return None
        return KeyValueCaches(
            [
                [module for module in template.module.modules() if isinstance(module, Attention)]
                for template in self._templates
            ]
        )

    def next_logits(self, tokens: Sequence[int], caches: KeyValueCaches | None) -> Tensor:
        """Logits `Float[v]` of the token that follows; only the last tokens count that it reads.

        Args:
            tokens: the whole text so far, at least one token.
            caches: those of this text, which are filled; None reads all tokens again.
        """
        longest = self.max_sequence
        if caches is None or (longest is not None and len(tokens) > longest):
            window = tokens[-longest:] if longest is not None else tokens
            return self.logits(torch.tensor([window]))[0, -1]
        # Positions move once a text is longer than the model, so that nothing can be kept then.
        return self._cached_logits(torch.tensor([tokens[caches.tokens :]]), caches)

    @torch.no_grad()
    def _cached_logits(self, tokens: Tensor, caches: KeyValueCaches) -> Tensor:
        x = tokens.to(self._device)
        for index, template in enumerate(self._templates):
            layer = self._layers[index]
            set_first_position(template.module, caches.tokens)
            caches.attach(index)
            try:
                # Only the last token is asked for what follows.
                x = x[:, -1:] if index == len(self._templates) - 1 else x
                x = template.raw_output(layer.weights, layer.buffers, x)
            finally:
                caches.detach(index)
                set_first_position(template.module, 0)
        caches.tokens += tokens.shape[1]
        return x[0, -1]
