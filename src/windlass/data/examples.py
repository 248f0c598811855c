"""Examples in memory or mapped into it: pairs of inputs and targets, or rows of token ids."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from windlass.data.batches import TokenBatch
from windlass.data.keyed_choices.permutation import keyed_permutation
from windlass.data.pixels import PixelScale
from windlass.data.tokenizer import Tokenizer
from windlass.errors import DataError, raise_data_errors

IGNORED_TARGET = -100
"""The only target that is no token: it does not count in the loss."""


_CLASSES = "classes"
"""Key of the names of classes in a file's metadata."""

ExampleArray = npt.NDArray[Any]
"""Token ids or numbers of some examples, `[example ...]`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExampleDataset:
    """Examples of one shape; the last ones are held out."""

    inputs: ExampleArray
    """Token ids `Int[example s]`, numbers `Float[example ...]`, or pixels `UInt8[example c h w]`
    with a `pixels`."""
    targets: ExampleArray
    """What each token of the inputs should predict, `Int[example s]`; the class of each example,
    `Int[example]`, or its numbers, `Float[example n]`."""
    held_out: int
    """Number of examples at the end that are never trained on."""
    documents: TokenBatch | None = None
    """Which document of its example each token belongs to, `Int[example s]`: none sees another,
    and positions begin at 0 in each. None means that an example is one document."""
    pixels: PixelScale | None = None
    """How pixels become numbers; None takes the inputs as they are."""
    classes: tuple[str, ...] | None = None
    """Names of the classes; None means that they have none, or that a source keeps them."""
    tokenizer: Tokenizer | None = None
    """What made the token ids; None if that is not known."""
    content: str | None = None
    """A hash of inputs and targets that is known already; None computes one when it is needed."""

    @property
    def has_tokens(self) -> bool:
        """Whether the inputs are rows of token ids."""
        return self.inputs.dtype == np.int64

    @property
    def has_classes(self) -> bool:
        """Whether each example has one class as its target."""
        return self.targets.ndim == 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.inputs.shape[1:])

    @property
    def sequence(self) -> int | None:
        """Tokens of an example; None without tokens."""
        return int(self.inputs.shape[1]) if self.has_tokens else None

    @property
    def vocabulary(self) -> int:
        """Entries that a model's vocabulary needs, classes, or numbers that are predicted."""
        if self.targets.dtype.kind == "f":
            return int(self.targets.shape[1])
        highest = int(self.targets.max())
        return 1 + (max(highest, int(self.inputs.max())) if self.has_tokens else highest)

    @property
    def fingerprint(self) -> str:
        """Hash of all examples."""
        digest = hashlib.sha256(str((self.inputs.shape, self.held_out)).encode())
        if self.content is not None:
            digest.update(self.content.encode())
        else:
            for part in (self.inputs, self.targets, *self._packed.values()):
                digest.update(part.tobytes())
        if self.pixels is not None:
            digest.update(str(self.pixels).encode())
        return digest.hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Writes the examples to a safetensors file."""
        held_out = np.array([self.held_out], dtype=np.int64)
        arrays = {
            "inputs": np.ascontiguousarray(self.inputs), "targets": self.targets,
            "held_out": held_out,
        }  # fmt: skip
        if self.pixels is not None:
            arrays |= {
                "mean": np.array(self.pixels.mean), "std": np.array(self.pixels.std),
                "moves": np.array([self.pixels.flips, self.pixels.border], dtype=np.int64),
            }  # fmt: skip
        names = None if self.classes is None else {_CLASSES: json.dumps(self.classes)}
        save_file(arrays | self._packed, path, metadata=names)

    def excerpt(self, *, train: int, held_out: int) -> "ExampleDataset":
        """The first examples to train on, and the first ones of those that are held out.

        Args:
            train: most examples to train on.
            held_out: most that are held out.
        """
        first = len(self.inputs) - self.held_out
        held_out = min(held_out, self.held_out)
        rows = np.r_[0 : min(train, first), first : first + held_out]
        documents = None if self.documents is None else self.documents[rows]
        return ExampleDataset(
            inputs=self.inputs[rows], targets=self.targets[rows], held_out=held_out,
            documents=documents, pixels=self.pixels, classes=self.classes,
        )  # fmt: skip

    @property
    def _packed(self) -> dict[str, TokenBatch]:
        return {} if self.documents is None else {"documents": self.documents}


def load_examples(path: Path) -> ExampleDataset | None:
    """The examples in a file that `ExampleDataset.save` wrote; None if there is none."""
    if not path.is_file():
        return None
    tensors, classes = load_file(path), None
    with safe_open(path, framework="numpy") as file:
        if names := (file.metadata() or {}).get(_CLASSES):
            classes = tuple(json.loads(names))
    pixels = None
    if "moves" in tensors:
        flips, border = tensors["moves"].tolist()
        mean, std = (tuple(tensors[name].tolist()) for name in ("mean", "std"))
        pixels = PixelScale(mean=mean, std=std, flips=bool(flips), border=border)
    return ExampleDataset(
        inputs=tensors["inputs"],
        targets=tensors["targets"],
        held_out=int(tensors["held_out"][0]),
        documents=tensors.get("documents"),
        pixels=pixels,
        classes=classes,
    )


def make_examples(
    data: Iterable[object], *, sequence: int | None, held_out: float, most: int | None = None
) -> ExampleDataset:
    """Examples from pairs `(inputs, targets)`, or from token ids that are cut into windows.

    Args:
        data: pairs of `Int[s]` of one length each, or of numbers `Float[...]` and a class, a number
            or several; or token ids, one `Int[token]` or several, which follow each other. Tensors,
            arrays and lists will do.
        sequence: tokens of a window; pairs have a length of their own.
        held_out: share of the examples that is held out, the last ones, at least one.
        most: items that are taken; None takes all.

    Raises:
        DataError: the data are too few, or of another form.
    """
    items = iter(data)
    first = next(items, None)
    if first is None:
        raise DataError("the data have no item; pass texts, token ids, or pairs of token ids")
    items = islice(chain([first], items), most)
    is_pair = isinstance(first, tuple | list) and len(first) == 2
    inputs: ExampleArray
    targets: ExampleArray
    if is_pair and is_numbers(first[0]):  # type: ignore[index]  # it is a pair
        inputs, targets = _number_pairs(items)
    elif is_pair and np.ndim(_array(first[0])) == 1:  # type: ignore[index]
        inputs, targets = _pairs(items)
    else:
        if sequence is None:
            raise DataError("token ids need a length of windows; set `train.sequence`")
        tokens = np.concatenate([_array(item).reshape(-1) for item in items])
        count = (len(tokens) - 1) // sequence
        inputs = tokens[: count * sequence].reshape(count, sequence)
        targets = tokens[1 : count * sequence + 1].reshape(count, sequence)
    if len(inputs) < 2:
        raise DataError(
            f"the data make {len(inputs)} examples, and at least 2 are needed, one of them held out"
        )
    is_class = targets.dtype.kind == "i"
    has_tokens = inputs.dtype == np.int64
    lowest = int(targets[targets != IGNORED_TARGET].min(initial=0)) if is_class else 0
    if lowest < 0 or (has_tokens and inputs.min() < 0):
        raise DataError(f"token ids below 0; only a target may be {IGNORED_TARGET}, to be ignored")
    examples = ExampleDataset(
        inputs=np.ascontiguousarray(inputs),
        targets=np.ascontiguousarray(targets),
        held_out=min(len(inputs) - 1, max(1, round(held_out * len(inputs)))),
    )
    _require_targets(examples)
    return examples


def _require_targets(examples: ExampleDataset) -> None:
    """Raises a `DataError` if no target counts among those to train on, or those held out."""
    training = len(examples.targets) - examples.held_out
    sides = {"training": examples.targets[:training], "held-out": examples.targets[training:]}
    raise_data_errors(
        [
            f"all targets of the {len(targets)} {side} examples are {IGNORED_TARGET}, so none "
            "counts in the loss; give at least one token a target"
            for side, targets in sides.items()
            if not target_counts(targets).any()
        ]
    )


_WEIGHTED_DIMENSIONS = 3


def weight_bits(weights: npt.NDArray[np.float32]) -> TokenBatch:
    """Weights of targets as whole numbers, which stand beside them in one array: their bits.

    Targets with weights are `Int[b 2 s]`: tokens `[:, 0]`, and the bits of their weights `[:, 1]`.
    """
    return np.asarray(weights, dtype=np.float32).view(np.int32).astype(np.int64)


def with_one_target(targets: ExampleArray) -> ExampleArray:
    """A copy of targets of which the first one counts."""
    targets = targets.copy()
    if targets.dtype.kind == "f":
        targets[0] = 0
    elif targets.ndim == _WEIGHTED_DIMENSIONS:
        targets[0, :, 0] = 0, weight_bits(np.ones(1, dtype=np.float32))[0]
    else:
        targets.flat[0] = 0
    return targets


def target_counts(targets: ExampleArray) -> TokenBatch:
    """Number of targets of each example that count in the loss, `Int[example]`.

    Of numbers an example has one, unless some are NaN, not known. Where targets have weights, it is
    the sum of these, `Float[example]`.
    """
    if targets.dtype.kind == "f":
        return np.asarray(~np.isnan(targets).any(axis=1), dtype=np.int64)
    if targets.ndim == _WEIGHTED_DIMENSIONS:
        weights = targets[:, 1].astype(np.int32).view(np.float32).astype(np.float64)
        totals: TokenBatch = np.where(targets[:, 0] == IGNORED_TARGET, 0.0, weights).sum(axis=1)
        return totals
    rows = targets.reshape(len(targets), -1)
    counts: TokenBatch = np.count_nonzero(rows != IGNORED_TARGET, axis=1)
    return counts


def is_numbers(value: object) -> bool:
    """Whether the inputs of a pair are numbers or an image, not token ids."""
    array = np.asarray(value)
    return array.dtype.kind == "f" or (array.dtype.kind in "iu" and array.ndim > 1)


def _number_pairs(items: Iterable[object]) -> tuple[ExampleArray, ExampleArray]:
    """Numbers `Float[example ...]`, and classes `Int[example]` or numbers `Float[example n]`."""
    inputs: list[ExampleArray] = []
    targets: list[ExampleArray] = []
    for index, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"item {index} of the data is no pair of inputs and targets")
        one, two = np.asarray(item[0]), np.asarray(item[1])
        shapes = (inputs[0].shape, targets[0].shape) if inputs else (one.shape, two.shape)
        is_class = two.dtype.kind in "iu" and two.ndim == 0
        if not is_class and (two.dtype.kind != "f" or two.ndim > 1):
            raise DataError(
                f"item {index} of the data has {two.dtype} targets of shape {two.shape}; a target "
                "is one class, an integer, or a number or several, of floating point"
            )
        if (one.shape, two.shape) != shapes or (
            targets and two.dtype.kind != targets[0].dtype.kind
        ):
            raise DataError(
                f"item {index} of the data has {one.shape} inputs and {two.shape} targets of "
                f"{two.dtype}, and all must be as the first, {shapes[0]} and {shapes[1]}"
            )
        inputs.append(one.astype(np.float32))
        targets.append(two.astype(np.int64 if is_class else np.float32))
    stacked = np.stack(targets)
    is_single = stacked.dtype.kind == "f" and stacked.ndim == 1
    return np.stack(inputs), stacked[:, None] if is_single else stacked


def _pairs(items: Iterable[object]) -> tuple[TokenBatch, TokenBatch]:
    inputs: list[TokenBatch] = []
    targets: list[TokenBatch] = []
    for index, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"item {index} of the data is no pair of inputs and targets")
        one, two = _array(item[0]), _array(item[1])
        length = len(inputs[0]) if inputs else len(one)
        if one.shape != (length,) or two.shape != (length,):
            raise DataError(
                f"item {index} of the data has {one.shape} inputs and {two.shape} targets, and all "
                f"must be {(length,)}; pad or cut them"
            )
        inputs.append(one)
        targets.append(two)
    return np.stack(inputs), np.stack(targets)


def _array(value: object) -> TokenBatch:
    """Token ids of a tensor, an array or a list."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise DataError(
            f"the data hold `{type(value).__name__}` of {array.dtype}, and token ids are integers"
        )
    return array.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ExampleBatches:
    """The batches of examples, each a function of the seed and the step alone, as `Batches`.

    Each epoch takes all examples in a keyed order. They have no text, and so no bits per byte.
    """

    examples: ExampleDataset
    _: KW_ONLY
    batch: int
    """Global batch, in examples."""
    seed: int

    @property
    def _training(self) -> int:
        return len(self.examples.inputs) - self.examples.held_out

    def samples(
        self, step: int, first: int = 0, count: int | None = None
    ) -> tuple[ExampleArray, ExampleArray]:
        """Inputs and targets of consecutive samples of a step, `Int[count s]` or as the examples'.

        Args:
            step: step, counted from 1.
            first: index of the first sample in the global batch, from 0.
            count: number of samples; None takes the rest of the batch.
        """
        rows = self._rows(step, first, self.batch - first if count is None else count)
        inputs, pixels = self.examples.inputs[rows], self.examples.pixels
        if pixels is not None:
            keys = [(self.seed, step, first + index) for index in range(len(rows))]
            inputs = pixels.training_numbers(inputs, keys)
        return inputs, self.examples.targets[rows]

    def document_ids(self, step: int, first: int, count: int) -> TokenBatch | None:
        """Documents `Int[count s]` of consecutive samples of a step; None if each is one."""
        documents = self.examples.documents
        return None if documents is None else documents[self._rows(step, first, count)]

    def held_out_documents(self, count: int, rows: int = 1) -> Iterator[TokenBatch | None]:
        """The documents of `held_out_batches(count, rows)`; None if each example is one."""
        documents = self.examples.documents
        for chosen in self._held_out_slices(count, rows):
            yield None if documents is None else documents[chosen]

    def target_counts(self, step: int) -> TokenBatch:
        """Number of targets that count in the loss, `Int[sample]`, of all samples of a step."""
        return target_counts(self.examples.targets[self._rows(step, 0, self.batch)])

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """The example that a sample of a step is, as a message names it."""
        return (f"example {self._rows(step, sample, 1)[0]}",)

    def held_out_batches(
        self, count: int, rows: int = 1
    ) -> Iterator[tuple[ExampleArray, ExampleArray]]:
        """Inputs and targets of held-out examples, the same in every call and every run.

        Args:
            count: total number of examples, limited to those that exist.
            rows: examples per batch; the last batch may have fewer.
        """
        for chosen in self._held_out_slices(count, rows):
            inputs, pixels = self.examples.inputs[chosen], self.examples.pixels
            yield (
                inputs if pixels is None else pixels.numbers(inputs),
                self.examples.targets[chosen],
            )

    def _held_out_slices(self, count: int, rows: int) -> Iterator[slice]:
        begin = self._training
        end = begin + min(count, self.examples.held_out)
        for start in range(begin, end, rows):
            yield slice(start, min(start + rows, end))

    def bits_per_byte(self, loss: float, count: int) -> None:
        """None: examples stand for no bytes of text."""
        del loss, count

    def _rows(self, step: int, first: int, count: int) -> TokenBatch:
        """Indices of consecutive samples of a step, `Int[sample]`."""
        index = (step - 1) * self.batch + first + np.arange(count, dtype=np.int64)
        epochs, within = np.divmod(index, self._training)
        rows = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            order = keyed_permutation(self._training, self.seed, epoch)
            rows[in_epoch] = order(within[in_epoch])
        return rows
