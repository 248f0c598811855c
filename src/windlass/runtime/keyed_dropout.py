"""Keyed randomness: a dropout mask is a function of where it stands, not of what ran before it.

The key is (seed, step, layer, position in the layer, sample, element), so the mask is the same
however the batch is cut into micro-batches, on whichever device, and when a layer runs again.
Keys enter compiled code as tensors: a new step is no reason to compile again.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.models.tensor_parallel.shard_module import SampleShard, ShardedDropout

_MASK = 2**64 - 1
# Constants of the generator SplitMix64. Source: Steele, Lea & Flood 2014, OOPSLA,
# "Fast splittable pseudorandom number generators", and Vigna's reference code.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_DRAW_BITS = 31
"""Bits of the hash that are compared with the rate."""
_MOST_USES = 2**20
"""More than any module is used in one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKeys:
    """What tells one use of a layer from every other."""

    samples: Tensor
    """`Int64[b]`: one for each sample of the micro-batch, of (seed, step, sample)."""
    layer: Tensor
    """`Int64[]`: of the layer's name."""
    active: Tensor
    """`Int64[]`: 1 in training, 0 in evaluation, where nothing is dropped."""


def sample_keys(seed: int, step: int, first: int, count: int) -> Tensor:
    """`Int64[b]`: the keys of samples `first`..`first + count` of one step's global batch."""
    base = _mix(_mix(seed) ^ step)
    return torch.tensor([_signed(_mix(base ^ sample)) for sample in range(first, first + count)])


def generator_seed(seed: int, step: int, layer: int, sample: int) -> int:
    """Seeds torch's own generator for one use of a layer, from its first sample on."""
    return _mix(_mix(_mix(_mix(seed) ^ step) ^ layer) ^ sample) >> 1


def disabled_keys(x: Tensor) -> DropoutKeys:
    """Keys with which nothing is dropped, for samples in the first dimension of `x`."""
    # Three tensors, not one three times: compiled code is told that they are not the same.
    return DropoutKeys(
        samples=torch.zeros(len(x), dtype=torch.int64, device=x.device),
        layer=torch.zeros((), dtype=torch.int64, device=x.device),
        active=torch.zeros((), dtype=torch.int64, device=x.device),
    )


def layer_key(name: str) -> Tensor:
    """`Int64[]`: the key of a layer."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.tensor(_signed(int.from_bytes(digest[:8], "little")))


def replace_dropout(layer: nn.Module) -> tuple[str, ...]:
    """Swaps every `nn.Dropout` in a layer for a keyed one, in place.

    Returns:
        Paths of the keyed modules, in order; a rate of 0 leaves none.
    """
    found = [
        (path, module)
        for path, module in layer.named_modules()
        if type(module) is nn.Dropout or isinstance(module, ShardedDropout)
    ]
    keyed: list[str] = []
    for path, module in found:
        parent, _, name = path.rpartition(".")
        swap: nn.Module = nn.Identity()
        if module.p > 0:
            part = module.shard if isinstance(module, ShardedDropout) else None
            swap = KeyedDropout(module.p, len(keyed), part)
            keyed.append(path)
        setattr(layer.get_submodule(parent), name, swap)
    return tuple(keyed)


def key_buffers(paths: Sequence[str], keys: DropoutKeys) -> dict[str, Tensor]:
    """The buffers that hand `keys` to the keyed modules at `paths`."""
    values = {"samples": keys.samples, "layer": keys.layer, "active": keys.active}
    return {f"{path}.{name}": value for path in paths for name, value in values.items()}


class KeyedDropout(nn.Module):
    """Dropout with a mask from its keys: element e is kept if `hash(key, e) >= rate`.

    A module may be used several times in one forward pass of its layer: each use counts on from
    `restart` and has a mask of its own.

    Args:
        rate: share of elements that become zero; the others grow by `1 / (1 - rate)`.
        position: index among the keyed modules of one layer.
        part: tells which elements of a sample a slice has; None: all.
    """

    samples: Tensor
    layer: Tensor
    active: Tensor

    def __init__(self, rate: float, position: int, part: SampleShard | None = None) -> None:
        super().__init__()
        self._threshold = round(rate * 2**_DRAW_BITS)
        self._growth = 1 / (1 - rate) - 1
        self._position = position
        self._part = part
        self._uses = 0
        for name in ("samples", "layer", "active"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def begin_forward(self) -> None:
        """Begins a forward pass of the layer."""
        self._uses = 0

    def forward(self, x: Tensor) -> Tensor:
        """`x` with elements dropped; its first dimension counts samples."""
        place = _signed(_mix(self._position * _MOST_USES + self._uses))
        self._uses += 1
        key = _mix_tensor(self.samples ^ (self.layer + place))
        # The idle "or" keeps the compiler from taking the product below for an index, which it
        # works out beyond 64 bits, and then refuses.
        element = self._elements(x) | 0
        draw = _draw(element * _signed(_GOLDEN) + key.unsqueeze(1)).view(x.shape)
        kept = draw >= self._threshold * self.active
        return torch.where(kept, x * (1 + self._growth * self.active).to(x.dtype), 0)

    def _elements(self, x: Tensor) -> Tensor:
        """`Int64[...]`: the number in the whole sample, from 1, of each element of a part of it."""
        count = x[0].numel()
        if self._part is None:
            return torch.arange(1, count + 1, dtype=torch.int64, device=x.device)
        tokens, features = self._part.tokens, self._part.features
        if features.total == 1:
            first = tokens.number * count + 1
            return torch.arange(first, first + count, dtype=torch.int64, device=x.device)
        own = x.shape[-1]
        first, begin = features.number * own + 1, tokens.number * (count // own)
        feature = torch.arange(first, first + own, dtype=torch.int64, device=x.device)
        token = torch.arange(begin, begin + count // own, dtype=torch.int64, device=x.device)
        return (token.unsqueeze(1) * (own * features.total) + feature).flatten()


def _mix(value: int) -> int:
    """SplitMix64's output for one integer."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _mix_tensor(value: Tensor) -> Tensor:
    """SplitMix64's output for each `Int64`, products modulo 2^64."""
    z = value + _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return z ^ _shift(z, 31)


def _draw(z: Tensor) -> Tensor:
    """The top bits of SplitMix64's output; its last exclusive-or leaves them as they are."""
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return _shift(z, 64 - _DRAW_BITS)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's own carries the sign."""
    return (value >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """The same 64 bits as torch's `int64` reads them."""
    return value - 2**64 if value >= 2**63 else value
