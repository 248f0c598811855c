"""Rates of attention, by how it is computed, its mask, its head width and the sequence."""

from collections.abc import Sequence
from math import log

from windlass.schema import AttentionRate, Curve, OtherAttention, Point

_TILE = 128
"""Keys of a tile of FlashAttention. Rates are those of causal masks, which leave a share of
`(s + 128) / 2s` of the tiles; without a mask all are computed. Source: Dao 2023, arXiv:2307.08691,
section 3."""


class AttentionRates:
    """Rates of attention in one precision, for one length of sequences.

    Head widths are measured with a mask and not compiled. Some were also measured without a mask,
    or compiled; the others change as they do.

    Args:
        measured: the rates that the device states.
        compiled: whether layers run as compiled code.
        interpolates: whether a width lies between those of the two nearest that were measured, as
            on a CPU, whose kernels have no tiles of a fixed width; else the nearest one counts.
    """

    def __init__(
        self,
        measured: Sequence[AttentionRate],
        sequence: float,
        *,
        compiled: bool,
        interpolates: bool,
    ) -> None:
        self._measured, self._sequence = measured, sequence
        self._compiled, self._interpolates = compiled, interpolates
        self._found: dict[tuple[OtherAttention | None, bool, float, bool], Curve | None] = {}

    def curve(
        self,
        attention: OtherAttention | None,
        head_width: float,
        *,
        is_causal: bool,
        backward: bool,
    ) -> Curve | None:
        """FLOP/s of attention; None if the device states none.

        Args:
            attention: how it is computed; None means by the fused kernel that torch prefers.
            head_width: width of its heads.
            is_causal: whether later tokens are hidden.
            backward: whether it is the backward pass.
        """
        key = attention, is_causal, head_width, backward
        if key not in self._found:
            typical = self._of(attention, is_causal=True, compiled=False)
            rate = self._at_width(typical, head_width, backward) if typical else None
            if rate is not None and not is_causal:
                unmasked = self._of(attention, is_causal=False, compiled=False)
                plain = (self._sequence + _TILE) / (2 * self._sequence)
                ratio = self._ratio(unmasked, typical, head_width, backward)
                rate *= plain if ratio is None else ratio
            if rate is not None and self._compiled:
                fused = self._of(attention, is_causal=True, compiled=True)
                rate *= self._ratio(fused, typical, head_width, backward) or 1.0
            curve = None if rate is None else Curve(points=(Point(1.0, rate),))
            self._found[key] = curve
        return self._found[key]

    def _of(
        self, attention: OtherAttention | None, *, is_causal: bool, compiled: bool
    ) -> list[AttentionRate]:
        """What was measured so."""
        way = attention, is_causal, compiled
        return [
            each for each in self._measured
            if (each.attention, each.is_causal, each.compiled) == way
        ]  # fmt: skip

    def _at_width(self, rates: list[AttentionRate], head_width: float, backward: bool) -> float:
        if not self._interpolates:
            return _curve(_nearest(rates, head_width), backward).at(self._sequence)
        points = sorted(
            Point(each.head_width, _curve(each, backward).at(self._sequence)) for each in rates
        )
        return Curve(points=tuple(points)).at(head_width)

    def _ratio(
        self,
        rates: list[AttentionRate],
        typical: list[AttentionRate],
        head_width: float,
        backward: bool,
    ) -> float | None:
        """How many times as fast as typical the nearest head width is; None if none was measured.

        Beyond the lengths that were measured, the ratio is that of the nearest one.
        """
        if not rates:
            return None
        rate = _nearest(rates, head_width)
        curve, other = (
            _curve(each, backward) for each in (rate, _nearest(typical, rate.head_width))
        )
        sequence = min(max(self._sequence, curve.points[0].size), curve.points[-1].size)
        return curve.at(sequence) / other.at(sequence)


def _curve(rate: AttentionRate, backward: bool) -> Curve:
    return rate.backward if backward else rate.forward


def _nearest(rates: list[AttentionRate], head_width: float) -> AttentionRate:
    return min(rates, key=lambda rate: abs(log(rate.head_width / head_width)))
