"""The law of an optimizer: what it keeps for each weight, what it reads, and what it costs.

`laws.toml` holds one table for each. Adding an optimizer takes one such table, its name in
`OptimizerName`, and one function in `runtime.optimizers.updates`.
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from math import prod, sqrt
from typing import Literal

from pydantic import Field

from windlass.document import Document

OtherOptimizer = Literal["lion", "sgd", "lamb", "muon", "schedule-free", "adafactor"]
OptimizerName = Literal["adamw", OtherOptimizer]

UpdateScope = Literal["element", "tensor", "matrix"]
"""What the update of one element reads beside its own weight, gradient and moments. `element`:
nothing, so that every kind of sharding is free. `tensor`: norms of the whole weight, which ranks
that hold parts of it sum. `matrix`: all of a matrix, which is gathered from them; other weights
are updated by element."""

LearningRateSchedule = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"]
"""How the learning rate goes on after its warm-up. `cosine` and `linear` fall to the final rate at
the last step; `wsd` (warm-up, stable, decay) stays, then falls linearly to it over the last steps;
`constant` stays; `inverse_sqrt` falls with the root of the step."""

_MATRIX = 2
"""Dimensions of a matrix."""
_MASTER_BYTES = 4
_ITERATED_BYTES = 2
"""Bytes of an element in Newton-Schulz iterations: bfloat16, unless weights are in float64."""

NEWTON_SCHULZ_STEPS = 5
"""Iterations that make an update of Muon orthogonal. Source: Jordan et al. 2024."""


class DefaultRate(Document):
    """The learning rate of an optimizer where a request names none: a share, or a rate."""

    share: float | None = Field(default=None, gt=0)
    """Share of AdamW's default for the model; None if `rate` is given."""
    rate: float | None = Field(default=None, gt=0)
    at_batch: int | None = Field(default=None, ge=1)
    """Global batch that `rate` is for, from which it goes with the root of the batch; None means
    that it holds for any."""
    reason: str

    def of_run(self, adamw: float, adamw_reason: str, batch: int) -> tuple[float, str]:
        """The rate for a batch, `rate * sqrt(batch / at_batch)` where it depends on it, and why.

        Args:
            adamw: AdamW's default for the model.
            adamw_reason: where that comes from.
            batch: global batch in sequences.
        """
        if self.rate is None:
            share = self.share or 1.0
            return share * adamw, f"{self.reason}; AdamW's is {adamw:g} {adamw_reason}"
        scale = 1.0 if self.at_batch is None else sqrt(batch / self.at_batch)
        return self.rate * scale, self.reason


class OptimizerLaw(Document):
    """What an optimizer keeps and costs, as runtime, memory model, clock and planner read it."""

    name: OptimizerName
    source: str
    scope: UpdateScope
    moments: int = Field(ge=0)
    """Moments of a weight, each in its shape."""
    matrix_moments: int | None = None
    """Those of weights that it updates as matrices; None means no other number."""
    factored: bool = False
    """Whether weights of two dimensions or more have their second moment in two vectors, means over
    their rows and columns."""
    fused: bool
    """Whether torch updates in one kernel, which reads and writes every tensor once."""
    calls: int = Field(ge=1)
    """Torch operations that update one piece of a weight."""
    accesses: int = Field(ge=1)
    """Elements that the kernel of AdamW reads or writes while these operations update one: 7 are
    its own. Without a fused kernel it is measured beside AdamW, on one thread."""
    passes: int = 1
    """Times that an update goes through offloaded state."""
    gradient_passes: int = 1
    """How many of these read gradients."""
    betas: tuple[float, float] | None = None
    """Default of `train.betas`; None if it has none, as with the next two."""
    momentum: float | None = None
    epsilon: float | None = None
    nesterov: bool | None = None
    """Default of `train.nesterov`; None if it has no such form."""
    weight_decay: float
    """Default of `train.weight_decay`."""
    schedule: LearningRateSchedule = "cosine"
    """Default of `train.schedule`."""
    learning_rate: DefaultRate | None = None
    """Default of `train.learning_rate`; None means the published one of a model's size."""
    relative_step: bool | None = None
    """Default of `train.relative_step`; None if its steps are never relative to a weight."""
    averages: bool = False
    """Whether it trains other weights than those that are evaluated, which average them. Its first
    moment is then a weight, and begins as the weight itself."""

    @property
    def quantizes_moments(self) -> bool:
        """Whether moments can be stored in fewer bits: the codec is for a mean and a square."""
        return self.name == "adamw"

    def factors(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this full shape has its second moment in two vectors."""
        return self.factored and len(shape) >= _MATRIX

    def updates_as_matrix(self, shape: tuple[int, ...], *, hidden: bool) -> bool:
        """Whether a weight has the moments of a matrix.

        Args:
            shape: full shape of the weight.
            hidden: whether it is between the first and the last layer.
        """
        return self.factors(shape) or (hidden and len(shape) == _MATRIX)

    def factor_elements(self, shape: tuple[int, ...]) -> int:
        """Elements of the two vectors of a weight of this full shape."""
        if not self.factors(shape):
            return 0
        *leading, rows, columns = shape
        return prod(leading) * (rows + columns)

    def moments_of(self, *, matrix: bool) -> int:
        """Moments of a weight, each in its shape.

        Args:
            matrix: whether it is updated as a matrix.
        """
        if matrix and self.matrix_moments is not None:
            return self.matrix_moments
        return self.moments

    def summed_elements(self, index: int, shape: tuple[int, ...]) -> int:
        """How many numbers the ranks that hold parts of a weight sum after a pass of its update.

        Adafactor sums squares and number of the weight's elements, and squares of gradients over
        rows and columns, then squares of the update; LAMB squares of the weight and of its update.
        """
        if self.scope != "tensor" or index >= self.passes - 1:
            return 0
        if not self.factored:
            return 2
        return 1 if index else 2 + self.factor_elements(shape)

    def matrix_flop(self, rows: int, columns: int) -> int:
        """FLOP of the products that update one whole matrix, beside its elements.

        Each Newton-Schulz iteration on `[a, b]`, a the shorter side, takes `4 a^2 b + 2 a^3`.
        """
        if self.scope != "matrix":
            return 0
        a, b = sorted((rows, columns))
        return NEWTON_SCHULZ_STEPS * (4 * a * a * b + 2 * a**3)

    def workspace_bytes(self, rows: int, columns: int, itemsize: int) -> int:
        """Most bytes that the update of one whole matrix holds beside its state and gradient.

        What is made orthogonal, `[a, b]` with a the shorter side, is held in the master's type; an
        iteration in bfloat16 reads and writes such a matrix and holds two `[a, a]`, or for its last
        product a third `[a, b]`.

        Args:
            itemsize: bytes of an element of its master weights.
        """
        if self.scope != "matrix":
            return 0
        iterated = itemsize if itemsize > _MASTER_BYTES else _ITERATED_BYTES
        a, b = sorted((rows, columns))
        return itemsize * a * b + iterated * max(3 * a * b, 2 * a * b + 2 * a * a)

    def first_moment(self, betas: tuple[float, float]) -> float | None:
        """The first moment after one update, as a share of the gradient: proofs read it there.

        None if it says nothing of the gradient's sign.
        """
        if self.averages or self.factored:
            return None
        shares = {"sgd": 1.0, "lion": 1 - betas[1]}
        return shares.get(self.name, 1 - betas[0])


def optimizer_law(name: OptimizerName | None) -> OptimizerLaw:
    """The law of an optimizer; None means AdamW, as in a plan."""
    return _laws()[name or "adamw"]


@cache
def _laws() -> dict[str, OptimizerLaw]:
    text = files("windlass.schema.optimizers").joinpath("laws.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return {name: OptimizerLaw.model_validate({"name": name} | tables[name]) for name in tables}


_UNREAD: dict[str, object] = {
    "betas": (0.9, 0.95), "momentum": 0.9, "nesterov": False, "epsilon": 1e-8,
    "relative_step": False,
}  # fmt: skip
"""Values of the settings that an optimizer does not read."""


def optimizer_settings(name: OptimizerName) -> dict[str, object]:
    """Default of each setting that the optimizers share, by key of `train`."""
    law = optimizer_law(name)
    read = {key: getattr(law, key) for key in _UNREAD}
    chosen = {key: _UNREAD[key] if value is None else value for key, value in read.items()}
    return {**chosen, "weight_decay": law.weight_decay, "schedule": law.schedule}


def unread_settings(name: OptimizerName, given: Mapping[str, object]) -> Iterator[str]:
    """Settings that an optimizer does not read, a sentence each.

    Args:
        given: values by key of `train`; None where nothing is given.
    """
    law = optimizer_law(name)
    for key, unread in _UNREAD.items():
        value = given[key]
        if getattr(law, key) is None and value not in (None, unread):
            yield (
                f"`{key}` = {str(value).lower()} with `optimizer` = {name}, which has none; leave "
                "it out"
            )


def averaging_faults(
    name: OptimizerName, betas: tuple[float, float] | None, ema: float | None
) -> Iterator[str]:
    """Why weights cannot be averaged as asked, a sentence each.

    Args:
        betas: its betas; None if none are given.
        ema: share of an average of the weights that remains after each step; None for no average.
    """
    if not optimizer_law(name).averages:
        return
    if ema is not None:
        yield (
            f"`ema` = {ema:g} with `optimizer` = {name}, which averages its weights by itself; "
            "leave it out"
        )
    if betas is not None and betas[0] == 0:
        yield (
            f"`betas` = {list(betas)} with `optimizer` = {name}: its gradients are taken at a "
            "point between two sequences of weights, of which 0 would lose one; set the first to "
            "more than 0, such as 0.9"
        )
