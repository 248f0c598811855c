"""Express: a row of a table becomes a run, or the reason why it cannot."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windlass.validation.csv_table import Row, Unsaid, needed, number
from windlass.validation.laws.resnet import image_cut, image_shape
from windlass.validation.model_shapes import shape_of
from windlass.validation.parallelism import cuts_of
from windlass.validation.runs import Cut, Run, Shape
from windlass.validation.software_stacks import Catalogue

_GIGABYTE, _GIB = 1e9, 2.0**30
_TOKENS = re.compile(r"tokens/s", re.IGNORECASE)
_HOSTS = re.compile(r"(\d+)x\S+x(\d+)A\d+")
"""MLPerf's name of a system of several hosts: `2xXE8545x4A100-SXM-40GB` is 2 of 4 devices each."""
_EACH = re.compile(r"/(GPU|device)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A row that cannot be expressed."""

    line: int
    model: str
    device: str
    reason: str


def express(rows: Sequence[Row], catalogue: Catalogue) -> list[Run | Refused]:
    """The run that each row of a table tells of.

    Args:
        rows: of one table; what one leaves out of a model's shape another may say.
        catalogue: devices and stacks that are known.
    """
    heads = _usual_heads(rows)
    found: list[Run | Refused] = []
    for row in rows:
        try:
            found.append(_run(row, catalogue, heads))
        except Unsaid as why:
            found.append(
                Refused(
                    line=row.line, model=row.text("model"), device=row.text("device"),
                    reason=str(why),
                )
            )  # fmt: skip
    return found


def _run(row: Row, catalogue: Catalogue, heads: Mapping[float, float]) -> Run:
    known = catalogue.device_of(row)
    if known is None:
        raise Unsaid(f"device {row.text('device')!r} is not known")
    told: list[str] = []
    image = image_shape(row)
    law = known.law if image is None else "images"
    shape = image or shape_of(row, heads, told)
    stack = catalogue.stack_of(row, law)
    cuts = [image_cut(row)] if image else cuts_of(row, shape, stack, told)
    failed = "OOM" in row.text("outcome").upper()
    seconds = None if failed else _step_seconds(row, shape, cuts[0])
    peak = _peak_bytes(row)
    if seconds is None and peak is None and not failed:
        raise Unsaid("no step time, throughput or peak memory is published")
    return Run(
        line=row.line,
        key=row.key,
        model=row.text("model"),
        machine=f"{row.text('device')} x {cuts[0].devices:g}",
        device=known.name,
        stack=stack.name,
        shape=shape,
        cut=cuts[0],
        per_host=_per_host(row, cuts[0].devices),
        choices=tuple(cuts) if len(cuts) > 1 else (),
        step_seconds=seconds,
        peak_bytes=peak,
        failed=failed,
        told=tuple(told),
    )


def _per_host(row: Row, devices: float) -> float | None:
    """Devices of each host, where the system's name tells them and they make all."""
    named = _HOSTS.match(row.text("system"))
    if not named or float(named[1]) * float(named[2]) != devices:
        return None
    return float(named[2])


def _usual_heads(rows: Sequence[Row]) -> dict[float, float]:
    """Width -> the number of heads that most rows of that width state, the first among equals."""
    stated: dict[float, Counter[float]] = {}
    for row in rows:
        try:
            width, heads = number(row, "hidden"), number(row, "heads")
        except Unsaid:
            continue
        if width and heads:
            stated.setdefault(width, Counter())[heads] += 1
    return {width: counted.most_common(1)[0][0] for width, counted in stated.items()}


def _step_seconds(row: Row, shape: Shape, cut: Cut) -> float | None:
    """Measured seconds of a step, from the throughput where no time is given."""
    seconds = number(row, "measured_step_s")
    if seconds:
        return seconds
    throughput, unit = number(row, "measured_throughput"), row.text("throughput_unit")
    if not throughput or not unit:
        return None
    (batch,) = needed(row, "global_batch")
    items = batch * (shape.sequence if _TOKENS.search(unit) else 1.0)
    return items / (throughput * (cut.devices if _EACH.search(unit) else 1.0))


def _peak_bytes(row: Row) -> float | None:
    gigabytes, gib = number(row, "peak_memory_gb"), number(row, "peak_memory_gib")
    if gigabytes:
        return gigabytes * _GIGABYTE
    return gib * _GIB if gib else None
