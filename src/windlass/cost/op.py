"""Op: seconds of one ATen operation, or of one compiled run of them, split into terms.

A product takes `FLOP / rate(FLOP)`, attention `FLOP / rate(sequence, head width)`, all else
`bytes / rate(bytes)` with the rate of its own name if the machine states one. To that comes the
launch. On a CPU the two add up, since one thread does them in turn; on an accelerator the host
launches ahead, and the larger of launch and work counts.
"""

from math import log
from typing import Literal, NamedTuple

from windlass.spec.graph import PRECISION_BYTES, LayerCost, Op, Precision
from windlass.spec.machine import AttentionRate, Curve, Device

Term = Literal["matmul", "attention", "traffic", "launch", "update", "norm", "load"]
"""What the time of a step goes into."""

TERMS: tuple[Term, ...] = (
    "matmul", "attention", "traffic", "launch", "update", "norm", "load",
)  # fmt: skip

_WORK: dict[str, Term] = {
    "matmul": "matmul", "attention": "attention", "memory": "traffic", "exchange": "traffic",
}  # fmt: skip
"""Of an exchange what it copies on the device itself; `Links` tells what the links take."""


class Seconds(NamedTuple):
    """Seconds of a piece of work by what they go into."""

    matmul: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    launch: float = 0.0
    update: float = 0.0
    norm: float = 0.0
    load: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)

    def plus(self, other: "Seconds") -> "Seconds":
        """Both pieces, one after the other."""
        return Seconds(*(mine + its for mine, its in zip(self, other, strict=True)))

    def times(self, share: float) -> "Seconds":
        """A part of it."""
        return Seconds(*(share * each for each in self))


class Setting(NamedTuple):
    """Under what an op runs."""

    micro: int
    sequence: int
    precision: Precision
    compiled: bool


class DeviceRates:
    """A device's rates, looked up by name once for all ops of a prediction.

    Args:
        device: the device.
        setting: micro-batch, sequence, precision and mode of all ops.
    """

    def __init__(self, device: Device, setting: Setting) -> None:
        self.device = device
        self.setting = setting
        rate = device.rate(setting.precision)
        self.matmul = rate.curve
        self.biased = rate.biased or rate.curve
        self._attention = rate.attention
        self._attention_rates = rate.attention_rates
        plain = device.fused_traffic if setting.compiled else None
        self.traffic = plain or device.traffic
        self._named: dict[str, Curve] = {}
        # A compiled op that was not measured compiled is as fast as the eager one.
        for compiled in (False, True) if setting.compiled else (False,):
            for op in device.op_rates:
                if op.precision == setting.precision and op.compiled == compiled:
                    self._named[op.name] = op.curve

    def traffic_rate(self, name: str, nbytes: float) -> float:
        """Bytes/s of an op that moves `nbytes`; of a compiled run, that of its slowest part."""
        rates = [self._named[part].at(nbytes) for part in name.split("+") if part in self._named]
        return min(rates) if rates else self.traffic.at(nbytes)

    def attention_rate(self, flop: float, head_width: float, *, backward: bool) -> float:
        """FLOP/s of fused attention."""
        if not self._attention_rates:
            return self._attention.at(flop)
        nearest = min(self._attention_rates, key=lambda rate: _apart(rate, head_width))
        curve = nearest.backward if backward else nearest.forward
        return curve.at(self.setting.sequence)


def pass_seconds(
    ops: tuple[Op, ...], cost: LayerCost, rates: DeviceRates, *, backward: bool
) -> Seconds:
    """Seconds of one forward or backward pass of a layer: its ops in turn, and the host's part.

    Args:
        ops: of the pass.
        cost: of the layer that they belong to.
        rates: of the device.
        backward: which of the two passes it is.
    """
    device, setting = rates.device, rates.setting
    width = _head_width(cost, setting)
    host = device.compiled_pass_seconds if setting.compiled else device.pass_seconds
    passed = Seconds(launch=host)
    for op in ops:
        passed = passed.plus(op_seconds(op, rates, head_width=width, backward=backward))
    return passed


def op_seconds(op: Op, rates: DeviceRates, *, head_width: float, backward: bool) -> Seconds:
    """Seconds of one op.

    Args:
        op: the op.
        rates: of the device.
        head_width: of the layer's attention heads.
        backward: whether it belongs to a backward pass.
    """
    micro, sequence, _, _ = rates.setting
    flop = op.flop.at(micro, sequence)
    read = op.read_bytes.at(micro, sequence)
    written = op.written_bytes.at(micro, sequence)
    if op.kind == "matmul":
        work = flop / (rates.biased if op.name == "addmm" else rates.matmul).at(flop)
    elif op.kind == "attention":
        work = flop / rates.attention_rate(flop, head_width, backward=backward)
    else:
        moved = read + written
        work = moved / rates.traffic_rate(op.name, moved) if moved else 0.0
    launch = rates.device.launch_seconds * op.calls
    if rates.device.kind != "cpu":
        launch = max(0.0, launch - work)
    terms = {_WORK[op.kind]: work}
    return Seconds(
        matmul=terms.get("matmul", 0.0),
        attention=terms.get("attention", 0.0),
        traffic=terms.get("traffic", 0.0),
        launch=launch,
    )


def _head_width(cost: LayerCost, setting: Setting) -> float:
    """Width of a layer's attention heads; 64 where it cannot be told.

    Fused attention of h heads of width k has `4 b h s^2 k` FLOP and writes `b h s` results of
    width k and as many float32 log-sum-exps. Source: Dao 2023, arXiv:2307.08691, algorithm 1.
    """
    for op in cost.forward:
        if op.kind == "attention":
            results = op.flop.at(setting.micro, setting.sequence) / (4 * setting.sequence)
            written = op.written_bytes.at(setting.micro, setting.sequence)
            sums = (written - results * PRECISION_BYTES[setting.precision]) / 4
            if sums >= 1 and results / sums >= 1:
                return results / sums
    return 64.0


def _apart(rate: AttentionRate, head_width: float) -> float:
    return abs(log(rate.head_width / head_width))
