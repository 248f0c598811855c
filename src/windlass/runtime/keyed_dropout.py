"""Keyed dropout: a mask is a function of its position, not of what ran before it.

The key is (seed, step, layer, position in the layer, sample, element), so the mask is the same
however the batch is divided into micro-batches, on any device, and when a layer is recomputed. Keys
are inputs of compiled code, so that a new step does not recompile.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.models import SampleShard, ShardedDropout, count_in_runs

_MASK = 2**64 - 1
# Constants of the generator SplitMix64. Source: Steele, Lea & Flood 2014, OOPSLA,
# "Fast splittable pseudorandom number generators", and Vigna's reference code.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_DRAW_BITS = 31
"""Bits of the hash that are compared with the rate."""
_MAX_CALLS = 2**20
"""Upper bound of how often one module is called in one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKeys:
    """The keys of one call of a layer, different from those of every other call."""

    samples: Tensor
    """`Int64[b]`: key of each sample in the micro-batch, from (seed, step, sample)."""
    layer: Tensor
    """`Int64[]`: key of the layer, from its name."""
    active: Tensor
    """`Int64[]`: 1 in training, 0 in evaluation, where nothing is dropped."""


def sample_keys(seed: int, step: int, first: int, count: int) -> Tensor:
    """`Int64[b]`: keys of the samples `first`..`first + count` of one step's global batch."""
    base = _mix(_mix(seed) ^ step)
    return torch.tensor([_signed(_mix(base ^ sample)) for sample in range(first, first + count)])


def generator_seed(seed: int, step: int, layer: int, sample: int) -> int:
    """Seed of torch's generator for one call of a layer."""
    return _mix(_mix(_mix(_mix(seed) ^ step) ^ layer) ^ sample) >> 1


def disabled_keys(x: Tensor) -> DropoutKeys:
    """Keys that disable dropout, for as many samples as the first dimension of `x` has."""
    # Three tensors, because compiled code assumes that they do not alias.
    return DropoutKeys(
        samples=torch.zeros(len(x), dtype=torch.int64, device=x.device),
        layer=torch.zeros((), dtype=torch.int64, device=x.device),
        active=torch.zeros((), dtype=torch.int64, device=x.device),
    )


def layer_key(name: str) -> Tensor:
    """`Int64[]`: key of a layer."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.tensor(_signed(int.from_bytes(digest[:8], "little")))


def replace_dropout(layer: nn.Module) -> tuple[str, ...]:
    """Replaces every `nn.Dropout` in a layer with a keyed one, in place.

    Returns:
        Paths of the keyed modules, in order; modules with a rate of 0 become identities.
    """
    dropouts = [
        (path, module)
        for path, module in layer.named_modules()
        if type(module) is nn.Dropout or isinstance(module, ShardedDropout)
    ]
    keyed: list[str] = []
    for path, module in dropouts:
        parent, _, name = path.rpartition(".")
        replacement: nn.Module = nn.Identity()
        vars(replacement)["p"] = module.p  # code around it may ask for its rate
        if module.p > 0:
            shard = module.shard if isinstance(module, ShardedDropout) else None
            replacement = KeyedDropout(module.p, len(keyed), shard)
            keyed.append(path)
        setattr(layer.get_submodule(parent), name, replacement)
    return tuple(keyed)


def key_buffers(paths: Sequence[str], keys: DropoutKeys) -> dict[str, Tensor]:
    """The buffers that pass `keys` to the keyed modules at `paths`."""
    values = {"samples": keys.samples, "layer": keys.layer, "active": keys.active}
    return {f"{path}.{name}": value for path in paths for name, value in values.items()}


class KeyedDropout(nn.Module):
    """Dropout with a mask from its keys: element e is kept if `hash(key, e) >= rate`.

    A module may be called several times in one forward pass of its layer: calls are counted from
    `begin_forward` on, and each has a mask of its own.

    Args:
        rate: share of elements that become zero; the others grow by `1 / (1 - rate)`.
        shard: the elements of a sample that a tensor-parallel rank has; None: all.
    """

    samples: Tensor
    layer: Tensor
    active: Tensor

    def __init__(self, rate: float, position: int, shard: SampleShard | None = None) -> None:
        super().__init__()
        self._threshold = round(rate * 2**_DRAW_BITS)
        self._growth = 1 / (1 - rate) - 1
        self._position = position
        self._shard = shard
        self._calls = 0
        for name in ("samples", "layer", "active"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def begin_forward(self) -> None:
        """Restarts the count of calls for a forward pass of the layer."""
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """`x[b ...]` with elements dropped."""
        call_key = _signed(_mix(self._position * _MAX_CALLS + self._calls))
        self._calls += 1
        key = _mix_tensor(self.samples ^ (self.layer + call_key))
        # `| 0` has no effect, except that the compiler no longer takes the product below for an
        # index, which it would evaluate beyond 64 bits and then reject.
        element = self._element_numbers(x) | 0
        draw = _draw(element * _signed(_GOLDEN) + key.unsqueeze(1)).view(x.shape)
        kept = draw >= self._threshold * self.active
        return torch.where(kept, x * (1 + self._growth * self.active).to(x.dtype), 0)

    def _element_numbers(self, x: Tensor) -> Tensor:
        """`Int64[n]`: number in the full sample, from 1 on, of each of a sample's n elements."""
        count = x[0].numel()
        if self._shard is None:
            return torch.arange(1, count + 1, dtype=torch.int64, device=x.device)
        runs, features = self._shard.tokens, self._shard.features
        if features.total == 1:
            length = count // len(runs)
            firsts = tuple(run.number * length + 1 for run in runs)
            return count_in_runs(count, firsts, x.device, dtype=torch.int64)
        width = x.shape[-1]
        tokens, first = count // width, features.number * width + 1
        firsts = tuple(run.number * (tokens // len(runs)) for run in runs)
        token = count_in_runs(tokens, firsts, x.device, dtype=torch.int64)
        feature = torch.arange(first, first + width, dtype=torch.int64, device=x.device)
        return (token.unsqueeze(1) * (width * features.total) + feature).flatten()


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
    """The top bits of SplitMix64's output, which its last exclusive-or does not change."""
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return _shift(z, 64 - _DRAW_BITS)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's operator shifts arithmetically."""
    return (value >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer, for torch's `int64`."""
    return value - 2**64 if value >= 2**63 else value
