"""One layer's trace with its numbers as polynomials of micro-batch and sequence.

The layer runs forward and backward at a few sizes, on fake tensors. Every count is then fitted as a
polynomial, and checked at one more size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.capture.recording.recorder import RecordedPass, record_layer
from windlass.capture.trace import FIT_MICRO_BATCHES, FittedTrace, fit_polynomial
from windlass.errors import ModelError
from windlass.models import (
    LayerStack,
    TensorParallelRank,
    gives_text_classes,
    has_sentence_head,
)
from windlass.schema import SENTENCES_PER_ROW, Precision, tensor_degree

CAPTURED_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
"""Precisions that layers are recorded in; costs in others follow from these."""
_MAX_SEQUENCE = 64
"""Upper limit of the sequences that are run; longer ones add no information."""
_MIN_SEQUENCE = 9
"""Shortest longest sequence of a model that can be captured."""
_CHECK_MICRO_BATCH = 5
_SHARD_TOKENS = ((4, 8, 12, 15), (2, 3, 4, 5))
"""Tokens of one rank in the runs of a sharded layer: three to fit at and one to check at. The
second row is for models that take only short sequences."""


BoundaryShape = tuple[int, ...]
"""What passes between two layers: the shape of one example, or of a token, `(d,)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUnderTest:
    """A layer to record, full or sharded."""

    stack: LayerStack
    index: int
    layer: nn.Module
    tp_rank: TensorParallelRank
    """The first tensor-parallel rank."""
    inputs: BoundaryShape | None
    """Shape of the input, of one rank; None if the layer takes tokens."""

    @property
    def last(self) -> bool:
        """Whether the loss follows."""
        return self.index == len(self.stack.layers) - 1

    @property
    def first(self) -> bool:
        """Whether it takes what the data give."""
        return self.index == 0

    @property
    def description(self) -> str:
        """How error messages name the layer."""
        sharded = f" on {_degree(self.tp_rank)} ranks" if self.tp_rank.degree > 1 else ""
        return f"layer `{self.stack.names[self.index]}` of model `{self.stack.name}`{sharded}"


def fit_layer(
    subject: LayerUnderTest, precision: Precision, *, selective: bool = False, fused: bool = False
) -> tuple[FittedTrace, BoundaryShape]:
    """The layer's trace with its numbers as polynomials, and the shape of its output.

    Args:
        selective: whether it keeps only the results of large matrix products.
        fused: whether its loss is fused with its projection; such an output has no shape.

    Raises:
        ModelError: the layer cannot run on fake tensors, takes only very short sequences, or has a
            number that is not a polynomial of micro-batch and sequence.
    """
    *fit_sequences, check_sequence = _sequences(subject.stack, subject.tp_rank)
    points = [(micro, sequence) for micro in FIT_MICRO_BATCHES for sequence in fit_sequences]
    check = (_CHECK_MICRO_BATCH, check_sequence)
    passes = {
        point: _record(subject, precision, point, selective=selective, fused=fused)
        for point in (*points, check)
    }
    first = passes[points[0]]
    for point, recorded in passes.items():
        if recorded.trace != first.trace:
            raise _not_one_polynomial(subject, point, "other operations")
    numbers = {point: recorded.numbers for point, recorded in passes.items()}
    # Most numbers are the same as others at every size.
    columns = tuple(zip(*(numbers[point] for point in points), strict=True))
    fits = {
        column: fit_polynomial(dict(zip(points, column, strict=True)), fit_sequences)
        for column in set(columns)
    }
    polynomials = tuple(fits[column] for column in columns)
    fitted = zip(polynomials, numbers[check], strict=True)
    if any(polynomial.at(*check) != number for polynomial, number in fitted):
        raise _not_one_polynomial(subject, check, "another amount of work")
    # The second and the third number of a text's shape are tokens and features.
    behind = 2 if subject.stack.examples is None else 1
    shape = () if fused else first.output_shape[behind:]
    return FittedTrace(trace=first.trace, numbers=polynomials), shape


def _not_one_polynomial(
    subject: LayerUnderTest, point: tuple[int, int], difference: str
) -> ModelError:
    return ModelError(
        f"{subject.description} does {difference} at micro-batch {point[0]}, sequence {point[1]} "
        "than at other sizes; its work must be a polynomial of both, at most linear in the "
        "micro-batch and quadratic in the sequence, so its code must not branch on sizes"
    )


def _record(
    subject: LayerUnderTest,
    precision: Precision,
    point: tuple[int, int],
    *,
    selective: bool,
    fused: bool,
) -> RecordedPass:
    try:
        return record_layer(
            subject.layer,
            _input_factory(subject, point),
            dtype=CAPTURED_DTYPES[precision],
            is_first=subject.first,
            target_shape=_target_shape(subject, point),
            target_dtype=_target_dtype(subject),
            selective=selective,
            fused=fused,
        )
    except Exception as error:
        raise ModelError(
            f"{subject.description} cannot run on fake tensors in {precision} at micro-batch "
            f"{point[0]}, sequence {point[1]}: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; its code must not "
            "depend on the values of tensors, and constant tensors must be buffers"
        ) from error


def _input_factory(subject: LayerUnderTest, point: tuple[int, int]) -> Callable[[], Tensor]:
    """Makes all tokens for the first layer, the rank's own vectors for any other."""
    (micro, sequence), inputs = point, subject.inputs
    if inputs is None:
        return lambda: torch.zeros(point, dtype=torch.int64)
    if subject.stack.examples is not None:
        return lambda: torch.empty(micro, *inputs)
    return lambda: torch.empty(micro, sequence // subject.tp_rank.rows, *inputs)


def _target_shape(subject: LayerUnderTest, point: tuple[int, int]) -> tuple[int, ...] | None:
    """Shape of the targets of the loss; None if it does not follow the layer."""
    if not subject.last:
        return None
    examples = subject.stack.examples
    if examples is None:
        micro, sequence = point
        if gives_text_classes(subject.layer):
            return (micro,)
        return micro, sequence + SENTENCES_PER_ROW * has_sentence_head(subject.layer)
    return point[:1] if examples.numbers is None else (point[0], examples.numbers)


def _target_dtype(subject: LayerUnderTest) -> torch.dtype:
    examples = subject.stack.examples
    return torch.float32 if examples is not None and examples.numbers else torch.int64


def _sequences(stack: LayerStack, tp_rank: TensorParallelRank) -> tuple[int, int, int, int]:
    """Three lengths to fit at and one to check at, all shorter than the model's longest.

    What takes no tokens is fitted at one length, on which nothing depends.
    """
    if stack.examples is not None:
        return (stack.examples.positions,) * 4
    if tp_rank.degree > 1:
        rows = tp_rank.rows
        longest = stack.max_sequence or _MAX_SEQUENCE * rows
        tokens = next(row for row in _SHARD_TOKENS if rows * row[-1] < longest)
        first, second, third, check = (rows * count for count in tokens)
        return first, second, third, check
    limit = stack.max_sequence
    longest = _MAX_SEQUENCE if limit is None else min(_MAX_SEQUENCE, limit)
    if longest < _MIN_SEQUENCE:
        raise ModelError(
            f"model `{stack.name}` takes sequences of at most {longest} tokens, must take "
            f"{_MIN_SEQUENCE} to be captured"
        )
    # At the full length a slice of the position table would be the table itself.
    check = longest - 1
    return check // 4, check // 2, 3 * check // 4, check


def sequence_errors(stack: LayerStack, tp_rank: TensorParallelRank) -> Iterator[str]:
    """Why a stack's sequences are too short to be captured on so many ranks, if they are."""
    least = tp_rank.rows * _SHARD_TOKENS[-1][-1] + 1
    if stack.max_sequence is not None and stack.max_sequence < least:
        yield (
            f"model `{stack.name}` takes sequences of at most {stack.max_sequence} tokens, must "
            f"take {least} to be captured on {_degree(tp_rank)} ranks; lower the degree"
        )


def _degree(tp_rank: TensorParallelRank) -> str:
    return str(tensor_degree(tp_rank.rows, tp_rank.columns))
