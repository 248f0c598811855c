"""Token batches by the written specification, docs/reference/data-order.md, in plain Python.

It shares no code with `windlass.data`, so that a mistake there is found: it reads the token files
itself, and works with Python's integers where `windlass.data` works with arrays.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_WORD = 2**64
_BLOCK = 1000
IGNORED_TARGET = -100


class PlainMasking(NamedTuple):
    """How tokens are hidden from a model that predicts masked tokens."""

    mask_token: int
    vocabulary: int
    """Number of ids that random tokens are drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBatches:
    """The samples of each step, and the held-out windows."""

    train: Sequence[int]
    """Training tokens, source after source."""
    held_out: Sequence[int]
    held_out_bytes: Sequence[int]
    """Bytes of text that each held-out token stands for."""
    source_tokens: tuple[int, ...]
    """Training tokens of each source."""
    weights: tuple[float, ...]
    """Share of each source among the samples."""
    sequence: int
    batch: int
    """Global batch in sequences."""
    seed: int
    masking: PlainMasking | None
    places = 0
    """Targets behind those of a sample's tokens."""

    def documents(self, step: int) -> None:
        """None: a window is one document."""
        del step

    def held_out_documents(self, count: int) -> None:
        """None: a window is one document."""
        del count

    def samples(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets `Int[batch s]` of a step, counted from 1."""
        examples = []
        for index in range(self.batch):
            window = self._window((step - 1) * self.batch + index)
            examples.append(self._example(window, (self.seed, step, index)))
        return _stacked(examples)

    def held_out_samples(self, count: int) -> tuple[Tensor, Tensor, int]:
        """Inputs and targets `Int[n s]` of at most `count` windows, and the targets' bytes."""
        examples, nbytes = [], 0
        available = (len(self.held_out) - 1) // self.sequence
        count = min(count, available)
        for index in range(count):
            start = (index * available // count) * self.sequence
            window = self.held_out[start : start + self.sequence + 1]
            example = self._example(list(window), (start,))
            examples.append(example)
            for offset, target in enumerate(example[1]):
                if target != IGNORED_TARGET:
                    # A masked token is its own target; otherwise the target is the next token.
                    next_token = 0 if self.masking else 1
                    nbytes += self.held_out_bytes[start + offset + next_token]
        return (*_stacked(examples), nbytes)

    def _window(self, sample: int) -> list[int]:
        """The `s + 1` tokens of a sample, counted from 0 over the whole run."""
        source, index = source_of(sample, self.weights, self.seed)
        first, size = sum(self.source_tokens[:source]), self.source_tokens[source]
        windows = size // self.sequence
        epoch, position = divmod(index, windows)
        key = (self.seed, source, epoch) if source else (self.seed, epoch)
        start = permuted(position, windows, *key) * self.sequence + number(size, *key)
        return [self.train[first + (start + at) % size] for at in range(self.sequence + 1)]

    def _example(self, window: list[int], key: tuple[int, ...]) -> tuple[list[int], list[int]]:
        if self.masking is None:
            return window[:-1], window[1:]
        return masked(window[:-1], self.masking, key)


def read_plain_batches(
    folder: Path,
    *,
    sequence: int,
    batch: int,
    seed: int,
    weights: Sequence[float] | None = None,
    masking: PlainMasking | None = None,
) -> PlainBatches:
    """The batches of the tokens in a folder.

    Args:
        weights: share of each source; None takes them in proportion to their tokens.
        masking: how tokens are masked; None predicts each next token.
    """
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    dtype = {"uint16": "<u2", "uint32": "<u4"}[meta["dtype"]]
    counts = tuple(int(source["tokens"]) for source in meta["train"]["sources"])
    return PlainBatches(
        train=np.fromfile(folder / "train.bin", dtype=dtype).tolist(),
        held_out=np.fromfile(folder / "held_out.bin", dtype=dtype).tolist(),
        held_out_bytes=np.fromfile(folder / "held_out.bytes.bin", dtype="<u4").tolist(),
        source_tokens=counts,
        weights=tuple(weights or counts),
        sequence=sequence,
        batch=batch,
        seed=seed,
        masking=masking,
    )


def source_of(sample: int, weights: Sequence[float], seed: int) -> tuple[int, int]:
    """The source of a sample of the run, and which of the source's samples it is."""
    if len(weights) == 1:
        return 0, sample
    block, position = divmod(sample, _BLOCK)
    image = permuted(position, _BLOCK, seed, block, 0, 0)
    shares = _shares(weights)
    for source, share in enumerate(shares):
        if image < share:
            return source, block * share + image
        image -= share
    raise ValueError(f"shares {shares} do not add up to {_BLOCK}")


def masked(
    tokens: list[int], masking: PlainMasking, key: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Tokens of which some are hidden, and the targets that these are."""
    inputs, targets = list(tokens), [IGNORED_TARGET] * len(tokens)
    count = max(1, round(0.15 * len(tokens)))
    hidden, random = round(0.8 * count), round(0.1 * count)
    for index in range(count):
        position = permuted(index, len(tokens), *key)
        targets[position] = tokens[position]
        if index < hidden:
            inputs[position] = masking.mask_token
        elif index < hidden + random:
            inputs[position] = number(masking.vocabulary, *key, position)
    return inputs, targets


def permuted(index: int, size: int, *key: int) -> int:
    """The image of an index under the permutation of `range(size)` that a key names."""
    digest = _digest("permutation", key)
    round_keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(8)]
    half = max(1, math.ceil((size - 1).bit_length() / 2))
    while True:
        left, right = index >> half, index % 2**half
        for round_key in round_keys:
            left, right = right, left ^ (finalized((right + round_key) % _WORD) % 2**half)
        index = (left << half) + right
        if index < size:
            return index


def number(below: int, *key: int) -> int:
    """The number in `range(below)` that a key names."""
    return int.from_bytes(_digest("number", key)[:16], "little") % below


def finalized(value: int) -> int:
    """SplitMix64's finalizer of 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % _WORD
    return value ^ (value >> 31)


def _digest(purpose: str, key: tuple[int, ...]) -> bytes:
    text = ", ".join([f"'{purpose}'", *map(str, key)])
    return hashlib.blake2b(f"({text})".encode()).digest()


def _shares(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a block: rounded down, at least 1, then evened out one by one."""
    total = math.fsum(weights)
    exact = [_BLOCK * weight / total for weight in weights]
    shares = [max(1, math.floor(share)) for share in exact]
    while sum(shares) != _BLOCK:
        lacks = sum(shares) < _BLOCK
        deviations = [
            (have - want) * (-1 if lacks else 1) for have, want in zip(shares, exact, strict=True)
        ]
        open_to_change = [i for i, share in enumerate(shares) if lacks or share > 1]
        chosen = max(open_to_change, key=lambda i: (deviations[i], -i))
        shares[chosen] += 1 if lacks else -1
    return shares


def _stacked(examples: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*examples, strict=True)
    return torch.tensor(inputs), torch.tensor(targets)
