"""A trained model as a function from tokens to logits, in memory or streamed layer by layer."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from windlass.models import Attention, LayerStack, can_cache_tokens, set_first_positions
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.load_state import load_checkpoint
from windlass.runtime.layer_templates import layer_templates
from windlass.runtime.parameters import LayerParameters, resident_layers
from windlass.schema import Precision

_FIRST_TOKENS = 64
"""Tokens that a cache has room for at least; its room doubles whenever it is full."""


class KeyValueCache:
    """The keys and values of one attention module, `[b g s k]` each.

    Args:
        window: number of last tokens that a token sees; None sees all.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._tokens = 0
        self._room: Tensor | None = None
        """Keys and values, `[2 b g room k]`."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that the new tokens see.

        Args:
            key: keys of all tokens if the cache is empty, else of the next one.
        """
        last = self._tokens + key.shape[2]
        if self._room is None or last > self._room.shape[3]:
            room = key.new_empty((2, *key.shape[:2], max(2 * last, _FIRST_TOKENS), key.shape[3]))
            if self._room is not None:
                room[:, :, :, : self._tokens] = self._room[:, :, :, : self._tokens]
            self._room = room
        self._room[0, :, :, self._tokens : last] = key
        self._room[1, :, :, self._tokens : last] = value
        is_next, self._tokens = bool(self._tokens), last
        first = max(last - self._window, 0) if self._window is not None and is_next else 0
        keys, values = self._room[:, :, :, first:last].unbind(0)
        return keys, values


class KeyValueCaches:
    """The caches of all attention modules of a model.

    Args:
        layers: the attention modules of each layer; layers of one kind share theirs.
    """

    def __init__(self, layers: list[list[Attention]]) -> None:
        self.tokens = 0
        """Number of tokens that were read."""
        self._modules = layers
        self._caches = [[KeyValueCache(module.window) for module in modules] for modules in layers]

    def attach(self, layer: int) -> None:
        """Lets the attention modules of a layer read and write its caches, until `detach`."""
        for module, cache in zip(self._modules[layer], self._caches[layer], strict=True):
            module.cache = cache.append

    def detach(self, layer: int) -> None:
        """Lets the attention modules of a layer see only the tokens that they are given."""
        for module in self._modules[layer]:
            module.cache = None


class InferenceModel:
    """A model with the weights of a checkpoint, without dropout and without gradients.

    Args:
        stack: the model that the checkpoint belongs to.
        checkpoint: checkpoint to load the weights from, its shards merged; None keeps those that
            the model begins with.
        phases: groups of layers that take turns in memory, whose weights are read from the
            checkpoint each time; 1 keeps all.

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
        phases: int = 1,
    ) -> None:
        self.max_sequence = stack.max_sequence
        """Longest sequence that it reads; None if it sets no limit."""
        self._stack, self._checkpoint = stack, checkpoint
        self._precision, self.device = precision, torch.device(device)
        self._templates = layer_templates(stack, compiled=False)
        self._caches_tokens = can_cache_tokens(stack.layers)
        count = len(stack.layers)
        phases = min(phases, count)
        ends = [count * phase // phases for phase in range(phases + 1)]
        self._phases = list(itertools.starmap(range, itertools.pairwise(ends)))
        self._layers = self._load(self._phases[0]) if phases == 1 else None

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits `Float[b s v]` for tokens `Int[b s]`, which may be on any device."""
        (logits,) = self.logits_of_batches([tokens])
        return logits

    def logits_of_batches(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Logits `Float[b s v]` for each batch of tokens `Int[b s]`, as they are asked for.

        All batches pass through one phase before the next one is loaded.
        """
        values = [tokens.to(self.device) for tokens in batches]
        for phase in self._phases:
            layers = self._load(phase) if self._layers is None else self._layers
            for place, x in enumerate(values):
                with torch.no_grad():
                    output = self._forward(phase, layers, x)
                if phase is self._phases[-1]:
                    yield output
                else:
                    values[place] = output
            # Freed before the next phase is loaded, so that there are never two.
            del layers

    def _forward(self, phase: range, layers: Sequence[LayerParameters], x: Tensor) -> Tensor:
        for index, layer in zip(phase, layers, strict=True):
            x = self._templates[index].raw_output(layer.weights, layer.buffers, x)
        return x

    def _load(self, phase: range) -> tuple[LayerParameters, ...]:
        """The layers of a phase, and for as long those whose weights they share."""
        stack = self._stack
        owners = {
            owner
            for full, owner in stack.tied_weights.items()
            if any(full.startswith(f"{stack.names[index]}.") for index in phase)
        }
        indices = [
            index
            for index, name in enumerate(stack.names)
            if index in phase or any(owner.startswith(f"{name}.") for owner in owners)
        ]
        part = replace(
            stack,
            layers=tuple(stack.layers[index] for index in indices),
            names=tuple(stack.names[index] for index in indices),
            kinds=tuple(stack.kinds[index] for index in indices),
        )
        layers = resident_layers(part, seed=0, precision=self._precision, device=self.device)
        if self._checkpoint is not None:
            load_checkpoint(self._checkpoint, layers, indices)
        return tuple(layer for index, layer in zip(indices, layers, strict=True) if index in phase)

    def new_caches(self) -> KeyValueCaches | None:
        """Caches for one text.

        Returns:
            None for a model of the user's own, which may look anywhere.
        """
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
        x, last = tokens.to(self.device), len(self._templates) - 1
        for phase in self._phases:
            layers = self._load(phase) if self._layers is None else self._layers
            for index, layer in zip(phase, layers, strict=True):
                template = self._templates[index]
                set_first_positions(template.module, (caches.tokens,))
                caches.attach(index)
                try:
                    # Only the last token is asked for what follows.
                    x = x[:, -1:] if index == last else x
                    x = template.raw_output(layer.weights, layer.buffers, x)
                finally:
                    caches.detach(index)
                    set_first_positions(template.module, (0,))
            # Freed before the next phase is loaded, so that there are never two.
            del layers
        caches.tokens += tokens.shape[1]
        return x[0, -1]
