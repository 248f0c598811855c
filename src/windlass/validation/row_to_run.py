"""Express: a row of a table becomes a run, or the reason why it cannot."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windlass.validation.csv_table import TableRow, UnusableRow, read_number, required_numbers
from windlass.validation.laws.resnet import resnet_run_config, resnet_shape
from windlass.validation.model_shapes import model_shape
from windlass.validation.parallelism import run_configs
from windlass.validation.published_run import ModelShape, PublishedRun, RunConfig
from windlass.validation.software_stacks import StackCatalog

_GIGABYTE, _GIB = 1e9, 2.0**30
_TOKENS = re.compile(r"tokens/s", re.IGNORECASE)
_HOSTS = re.compile(r"(\d+)x\S+x(\d+)A\d+")
"""MLPerf's name of a system of several hosts: `2xXE8545x4A100-SXM-40GB` is 2 of 4 devices each."""
_EACH = re.compile(r"/(GPU|device)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row that cannot be expressed."""

    line: int
    model: str
    device: str
    reason: str


def rows_to_runs(
    rows: Sequence[TableRow], catalogue: StackCatalog
) -> list[PublishedRun | SkippedRow]:
    """The run that each row of a table tells of.

    Args:
        rows: of one table; what one leaves out of a model's shape another may say.
        catalogue: devices and stacks that are known.
    """
    heads = _usual_heads(rows)
    found: list[PublishedRun | SkippedRow] = []
    for row in rows:
        try:
            found.append(_run(row, catalogue, heads))
        except UnusableRow as why:
            found.append(
                SkippedRow(
                    line=row.line, model=row.text("model"), device=row.text("device"),
                    reason=str(why),
                )
            )  # fmt: skip
    return found


def _run(row: TableRow, catalogue: StackCatalog, heads: Mapping[float, float]) -> PublishedRun:
    known = catalogue.match_device(row)
    if known is None:
        raise UnusableRow(f"device {row.text('device')!r} is not known")
    told: list[str] = []
    image = resnet_shape(row)
    law = known.law if image is None else "resnet"
    shape = image or model_shape(row, heads, told)
    stack = catalogue.match_stack(row, law)
    cuts = [resnet_run_config(row)] if image else run_configs(row, shape, stack, told)
    failed = "OOM" in row.text("outcome").upper()
    seconds = None if failed else _step_seconds(row, shape, cuts[0])
    peak = _peak_bytes(row)
    if seconds is None and peak is None and not failed:
        raise UnusableRow("no step time, throughput or peak memory is published")
    return PublishedRun(
        line=row.line,
        key=row.key,
        model=row.text("model"),
        machine=f"{row.text('device')} x {cuts[0].devices:g}",
        device=known.name,
        stack=stack.name,
        shape=shape,
        config=cuts[0],
        per_host=_per_host(row, cuts[0].devices),
        candidates=tuple(cuts) if len(cuts) > 1 else (),
        step_seconds=seconds,
        peak_bytes=peak,
        out_of_memory=failed,
        assumptions=tuple(told),
    )


def _per_host(row: TableRow, devices: float) -> float | None:
    """Devices of each host, where the system's name tells them and they make all."""
    named = _HOSTS.match(row.text("system"))
    if not named or float(named[1]) * float(named[2]) != devices:
        return None
    return float(named[2])


def _usual_heads(rows: Sequence[TableRow]) -> dict[float, float]:
    """Width -> the number of heads that most rows of that width state, the first among equals."""
    stated: dict[float, Counter[float]] = {}
    for row in rows:
        try:
            width, heads = read_number(row, "hidden"), read_number(row, "heads")
        except UnusableRow:
            continue
        if width and heads:
            stated.setdefault(width, Counter())[heads] += 1
    return {width: counted.most_common(1)[0][0] for width, counted in stated.items()}


def _step_seconds(row: TableRow, shape: ModelShape, cut: RunConfig) -> float | None:
    """Measured seconds of a step, from the throughput where no time is given."""
    seconds = read_number(row, "measured_step_s")
    if seconds:
        return seconds
    throughput, unit = read_number(row, "measured_throughput"), row.text("throughput_unit")
    if not throughput or not unit:
        return None
    (batch,) = required_numbers(row, "global_batch")
    items = batch * (shape.sequence if _TOKENS.search(unit) else 1.0)
    return items / (throughput * (cut.devices if _EACH.search(unit) else 1.0))


def _peak_bytes(row: TableRow) -> float | None:
    gigabytes, gib = read_number(row, "peak_memory_gb"), read_number(row, "peak_memory_gib")
    if gigabytes:
        return gigabytes * _GIGABYTE
    return gib * _GIB if gib else None
