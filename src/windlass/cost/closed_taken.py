"""Taken: seconds of the passes of many ways to run a chain, folded to its stages."""

from typing import Literal

import numpy as np

from windlass.cost.closed_ends import Loans, Passed, alike
from windlass.cost.closed_layers import Chain, Floats
from windlass.cost.closed_parts import LayerSums, Parts, Repeats
from windlass.cost.closed_pipeline import Durations, LoanBack, fold
from windlass.cost.closed_places import layers_again
from windlass.cost.closed_rows import Rows

_Name = Literal[
    "forward", "backward", "backward_input", "backward_weight", "sum_first", "sum_later"
]
_NAMES: tuple[_Name, ...] = (
    "forward", "backward", "backward_input", "backward_weight", "sum_first", "sum_later",
)  # fmt: skip
_SINGLE = 5
"""Numbers of a setting that are not of a kind of layer."""


class Times:
    """Seconds of passes by kind of layer, a row for each of `Rows` runs."""

    def __init__(self, chain: Chain, parts: Parts, rows: Rows) -> None:
        self._parts = parts
        settings = rows.settings

        def of(place: int) -> Floats:
            setting = settings.all[place]
            passes = chain.passes(setting)
            lent = chain.lent_elements(setting.tensor) if chain.tied else 0.0
            taking = (
                chain.take_over_seconds(setting.tensor, setting.precision, setting.sums)
                if chain.tied
                else 0.0
            )
            return np.concatenate(
                [
                    *(getattr(passes, name) for name in _NAMES),
                    [passes.load_seconds, passes.output[0]],
                    [lent * passes.weight_bytes, lent * passes.gradient_bytes, taking],
                ]
            )

        def message(place: int) -> Floats:
            return np.concatenate(chain.message_ways([settings.all[place]], parts.shape.pipeline))

        found = settings.table(chain, "times", of).at(rows.setting)
        kinds = np.split(found[:, :-_SINGLE], len(_NAMES), axis=1)
        self._by_kind = dict(zip(_NAMES, kinds, strict=True))
        self.load, output, weights, gradients, self.taking = found[:, -_SINGLE:].T
        ways = settings.table(chain, f"messages of {parts.shape.pipeline}", message)
        each_byte, each_message = ways.at(rows.setting).T
        self.message = output * each_byte + each_message
        self.lending = weights * each_byte + each_message
        """Of a message with the weights that are lent."""
        self.handing = gradients * each_byte + each_message
        """Of a message with their gradient."""
        self._patterns = [layers_again(parts.shape, parts.ends, each) for each in rows.agains]
        self._pattern = rows.again
        self.alike = alike(chain.sorts, self._patterns)
        """Of each layer but the last whether the next one is alike in all runs."""

    def by_kind(self, name: _Name) -> Floats:
        """Seconds of one pass of each kind of layer."""
        return self._by_kind[name]

    def sums(self, *names: _Name, again: bool = False) -> LayerSums:
        """Passes, one after the other; with the forward pass of layers that are computed again."""
        each = np.add.reduce([self._by_kind[name] for name in names])
        repeats = Repeats(self._by_kind["forward"], self._patterns, self._pattern)
        return LayerSums(self._parts, each, repeats if again else None)


class Taken:
    """Seconds of passes, a row for each of `Rows` runs.

    Args:
        chain: of layers.
        parts: of the plans.
        rows: the plans.
        stops: whether devices wait for some of what they exchange behind their passes.
    """

    def __init__(self, chain: Chain, parts: Parts, rows: Rows, *, stops: bool) -> None:
        shape = parts.shape
        in_turn = chain.machine.rule == "bulk-synchronous"
        times = Times(chain, parts, rows)
        loans = _loans(chain, parts, times)
        self.forward, self.load = times.by_kind("forward"), times.load
        self.borrower = chain.tied[0][0] if chain.tied else None
        """The layer that borrows weights, if one does."""
        parted = shape.order == "zero-bubble"
        adding = [
            times.sums("backward_weight" if parted else "backward", each, again=not parted)
            for each in ("sum_later", "sum_first")
        ]
        later, first = (each.by_chunk().T for each in adding)
        load = np.zeros_like(later)
        load[[0, -1]] = times.load
        none = np.zeros_like(later)
        inputs = times.sums("backward_input", again=True).by_chunk().T if parted else none
        folded = fold(
            shape,
            Durations(
                forward=times.sums("forward").by_chunk().T,
                backward=inputs if parted else later,
                backward_first=inputs if parted else first,
                weight=later if parted else none,
                weight_first=first if parted else none,
                load=load,
                message=times.message,
                lending=np.zeros_like(times.message) if loans is None else loans.lending,
                lender=0 if loans is None else int(parts.stage[loans.owner]),
                loan=None if loans is None or parted else _way_back(loans, parts),
                stops=stops,
                in_turn=in_turn,
            ),
            rows.micros.astype(np.float64),
        )
        self.passed = Passed(
            folded=folded,
            layers=adding[int(shape.micros == 1)],
            message=times.message,
            loans=loans,
            in_turn=in_turn,
            alike=times.alike,
        )


def _loans(chain: Chain, parts: Parts, times: Times) -> Loans | None:
    """What the first tied weights cost; None if they are not on two stages."""
    if not chain.tied:
        return None
    layer, owner = chain.tied[0]
    if parts.stage[owner] == parts.stage[layer]:
        return None
    parted = parts.shape.order == "zero-bubble"
    after = times.sums(
        "backward_weight" if parted else "backward",
        "sum_first" if parts.shape.micros == 1 else "sum_later",
    )
    return Loans(
        owner=owner,
        lending=times.lending,
        message=times.handing,
        after=after.over(layer, layer + 1),
        taking=times.taking,
    )


def _way_back(loans: Loans, parts: Parts) -> LoanBack:
    return LoanBack(
        message=loans.message,
        after=loans.after,
        taking=loans.taking,
        owner=int(parts.chunk[loans.owner]),
    )
