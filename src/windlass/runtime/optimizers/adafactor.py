"""Adafactor: a second moment in two vectors, and steps as large as the weight they change.

    r <- b r + (1 - b) mean over columns of (g^2 + epsilon),  c likewise over rows,  b = 1 - t^-0.8
    u = g / sqrt(r c / mean r)
    w <- (1 - rate decay) w - a u / max(1, rms u)
    a = max(0.001, rms w) min(rate, 1 / sqrt t), or the rate without `relative_step`

Weights of one dimension keep `v <- b v + (1 - b) (g^2 + epsilon)` for each element. Source: Shazeer
& Stern 2018, arXiv:1804.04235, algorithms 4 to 6, with the weight decay of `torch.optim.Adafactor`.
Both root mean squares are of whole weights, so that an update takes three passes.
"""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from windlass.runtime.optimizer_state.factored_moment import (
    Block,
    FactoredMoment,
    MatrixPlace,
    blocks,
)
from windlass.runtime.optimizers.updates import Chunk, Hyperparameters, Scratch

_DECAY_RATE = 0.8
_LEAST_RMS = 1e-3
"""Least root mean square of a weight that a step is relative to: weights that begin at 0 move."""
_CLIP = 1.0
"""Largest root mean square of an update."""


class AdafactorStep:
    """One step of one weight.

    Args:
        moment: second moment of the weight; None if each element has its own.
    """

    reads_gradient: ClassVar[tuple[bool, ...]] = (True, True, True)
    """Whether each pass reads gradients."""

    def __init__(
        self, hyper: Hyperparameters, moment: FactoredMoment | None, scratch: Scratch
    ) -> None:
        self._hyper, self._moment, self._scratch = hyper, moment, scratch
        self._sums: Tensor | None = None
        self._scale: Tensor | None = None
        """Factor of the update of an element, beside those of its row and column."""
        self._elements: Tensor | None = None
        self._place: MatrixPlace | None = None
        self._factors: _UpdateFactors | None = None

    def visit(self, index: int, chunk: Chunk, gradient: Tensor) -> None:
        """Sees a chunk in one of the three passes; the last one updates it.

        Args:
            gradient: its gradient in the master's precision; the last pass may overwrite it.
        """
        if index == 0:
            self._observe(chunk, gradient)
            return
        if index == 1:
            for square in self._update_squares(chunk, gradient):
                self._sums = square if self._sums is None else self._sums.add_(square)
            return
        self._apply(chunk, gradient)

    def _apply(self, chunk: Chunk, gradient: Tensor) -> None:
        if self._scale is None:
            raise ValueError("the sums of the first pass were not taken")
        hyper, factors = self._hyper, self._factors
        if hyper.decay:
            chunk.master.mul_(1 - hyper.host_rate * hyper.decay)
        master, flat = chunk.master.view(-1), gradient.reshape(-1)
        if factors is None:
            master.sub_(self._element_update(chunk, flat).mul_(self._scale))
        else:
            # Nobody reads the gradient after this pass, so that no third tensor is written.
            rows = (factors.rows * self._scale)[:, None]
            for block in blocks(chunk.offset, len(flat), len(factors.place.columns)):
                values = flat[block.elements].view(block.shape).mul_(factors.columns_of(block))
                own = master[block.elements].view(block.shape)
                own.addcmul_(values, rows[block.rows], value=-1)
        chunk.updates.add_(1)

    def own_sums(self) -> Tensor:
        """`Float[n]`: what the chunks of a pass add up to, handed over."""
        if self._sums is None:
            raise ValueError("no chunk was seen in this pass")
        sums, self._sums = self._sums, None
        return sums

    def take(self, index: int, sums: Tensor) -> None:
        """Goes on with what a pass summed over the whole weight."""
        if index == 0:
            square, self._elements = sums[0], sums[1]
            self._scale = self._step_size((square / self._elements).sqrt_())
            if self._moment is not None:
                self._update_moment(self._moment, sums[2:])
        elif self._scale is not None and self._elements is not None:
            rms = (sums[0] / self._elements).sqrt_()
            self._scale = self._scale / (rms / _CLIP).clamp_(min=1.0)

    def _observe(self, chunk: Chunk, gradient: Tensor) -> None:
        """Sums squares of a chunk; updates a moment that is kept element by element."""
        self._updates = chunk.updates + 1
        flat = gradient.reshape(-1)
        square = torch.linalg.vector_norm(chunk.master).square_()
        if self._sums is None:
            moment = self._moment
            kept = 0 if moment is None else moment.rows.numel() + moment.columns.numel()
            self._sums = square.new_zeros(2 + kept)
        self._sums[0].add_(square)
        self._sums[1].add_(flat.numel())
        if self._moment is None:
            values = chunk.moments[0].values.view(-1)
            squares = self._divided(flat).square()
            values.lerp_(squares.add_(self._hyper.settings.epsilon), self._newest(values))
            return
        self._add_squares(self._moment, flat, chunk.offset, self._sums[2:])

    def _add_squares(self, moment: FactoredMoment, flat: Tensor, first: int, sums: Tensor) -> None:
        """Adds squares of gradients to the sums over rows and columns of the whole weight."""
        place = self._place = self._place or moment.place()
        rows = sums[: moment.rows.numel()]
        columns = sums[moment.rows.numel() :].view_as(moment.columns)
        for block in blocks(first, len(flat), len(place.columns)):
            values = flat[block.elements].view(block.shape)
            squares = torch.mul(values, values, out=self._scratch.like(values))
            rows.index_add_(0, place.rows[block.rows], squares.sum(1))
            own = place.columns[block.columns]
            if len(columns) == 1:
                columns[0].index_add_(0, own, squares.sum(0))
            else:
                matrices = place.matrices[block.rows]
                added = squares.new_zeros(len(columns), len(own)).index_add_(0, matrices, squares)
                columns.index_add_(1, own, added)

    def _update_moment(self, moment: FactoredMoment, sums: Tensor) -> None:
        epsilon, count = self._hyper.settings.epsilon, moment.rows.numel()
        # They are squares of gradients that nobody has divided yet, which saves a pass over them.
        sums = self._divided(self._divided(sums))
        rows = sums[:count].view_as(moment.rows).div(moment.shape[-1])
        columns = sums[count:].view_as(moment.columns).div(moment.shape[-2])
        newest = self._newest(moment.rows)
        moment.rows.lerp_(rows.add_(epsilon), newest)
        moment.columns.lerp_(columns.add_(epsilon), newest)
        if self._place is not None:
            relative = moment.rows / moment.rows.mean(dim=1, keepdim=True)
            self._factors = _UpdateFactors(
                self._place,
                self._divided(relative.rsqrt_().view(-1)[self._place.rows]),
                moment.columns[:, self._place.columns].rsqrt_(),
            )

    def _update_squares(self, chunk: Chunk, gradient: Tensor) -> Iterator[Tensor]:
        """`Float[1]` each: sums of squares of parts of the update of a chunk, before its scale."""
        flat, factors = gradient.reshape(-1), self._factors
        if factors is None:
            yield torch.linalg.vector_norm(self._element_update(chunk, flat)).square_().view(1)
            return
        for block in blocks(chunk.offset, len(flat), len(factors.place.columns)):
            values = flat[block.elements].view(block.shape)
            out = self._scratch.like(values)
            values = torch.mul(values, factors.columns_of(block), out=out)
            # The factor of a row is that of its norm.
            norms = torch.linalg.vector_norm(values, dim=1).mul_(factors.rows[block.rows])
            yield torch.linalg.vector_norm(norms).square_().view(1)

    def _element_update(self, chunk: Chunk, flat: Tensor) -> Tensor:
        """The update of a chunk whose moment is kept element by element, as new."""
        return self._divided(flat) * chunk.moments[0].values.view(-1).rsqrt()

    def _divided(self, values: Tensor) -> Tensor:
        """Gradients of a chunk as they are clipped; their memory stays as it is."""
        divisor = self._hyper.clip_divisor
        return values if divisor is None else values / divisor

    def _newest(self, like: Tensor) -> Tensor:
        """`Float[]`: share of this step's squares in the moment, `t^-0.8`."""
        return self._updates.to(like.dtype).pow(-_DECAY_RATE)

    def _step_size(self, rms: Tensor) -> Tensor:
        """`Float[]`: what an update of root mean square 1 moves the weight by, in that measure."""
        hyper = self._hyper
        if not hyper.settings.relative_step:
            return torch.full_like(rms, hyper.host_rate)
        rate = self._updates.to(rms.dtype).rsqrt().clamp_(max=hyper.host_rate)
        return rms.clamp_(min=_LEAST_RMS) * rate


class _UpdateFactors(NamedTuple):
    """What each gradient of a part of a matrix is multiplied by, apart from one scale for all."""

    place: MatrixPlace
    rows: Tensor
    """`Float[own rows]`: factor of each row."""
    columns: Tensor
    """`Float[matrices own columns]`: factor of each column."""

    def columns_of(self, block: Block) -> Tensor:
        """Factors of the columns of a block, `[1 columns]` or by row."""
        columns = self.columns
        if len(columns) > 1:
            columns = columns[self.place.matrices[block.rows]]
        return columns[:, block.columns]
