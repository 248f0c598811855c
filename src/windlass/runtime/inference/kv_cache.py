"""Keys and values of the tokens that a model has read, so that each passes through it once."""

from torch import Tensor

from windlass.models import Attention

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
