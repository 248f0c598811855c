"""Makes examples of pairs of inputs and targets, or of rows of token ids."""

from collections.abc import Iterable
from itertools import chain, islice

import numpy as np

from windlass.data.batches import TokenBatch
from windlass.data.examples.example_dataset import ExampleDataset
from windlass.data.targets import IGNORED_TARGET, ExampleArray, target_counts
from windlass.errors import DataError, raise_data_errors


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
