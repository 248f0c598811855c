"""Turns rows of a table into published runs, or states why a row cannot become one."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from windlass.stacks import load_stack
from windlass.validation.clusters import find_cluster, find_host_family
from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    check_numbers,
    read_number,
    read_word,
    required_numbers,
    shown_cell,
)
from windlass.validation.ipu_runs import ipu_run_config
from windlass.validation.model_shapes import model_shape
from windlass.validation.published_run import (
    ModelShape,
    PublishedRun,
    RunConfig,
    image_model,
    image_run_config,
    image_shape,
)
from windlass.validation.run_configs import run_configs

_GIGABYTE, _GIB = 1e9, 2.0**30
_TOKENS = re.compile(r"tokens/s", re.IGNORECASE)
_OUTCOMES = {"": False, "ok": False, "oom": True}
_HOSTS = re.compile(r"(\d+)x\S+x(\d+)A\d+")
"""MLPerf's name of a system of several hosts: `2xXE8545x4A100-SXM-40GB` is 2 hosts of 4 devices."""
_PER_DEVICE = re.compile(r"/(GPU|device)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row that cannot become a run, with the reason."""

    line: int
    model: str
    device: str
    reason: str


def rows_to_runs(rows: Sequence[TableRow]) -> list[PublishedRun | SkippedRow]:
    """The run that each row of a table describes, in the order of the rows.

    Args:
        rows: all rows of one table; a row may lack attention heads that others of its width state.
    """
    heads = _usual_heads(rows)
    runs: list[PublishedRun | SkippedRow] = []
    for row in rows:
        try:
            runs.append(_run(row, heads))
        except UnusableRow as reason:
            runs.append(
                SkippedRow(
                    line=row.line, model=row.text("model"), device=row.text("device"),
                    reason=str(reason),
                )
            )  # fmt: skip
    return runs


_IPU_HOSTS = ("bow-2000", "ipu-m2000")


def _run(row: TableRow, heads: Mapping[float, float]) -> PublishedRun:
    family = find_host_family(row)
    if family is None:
        raise UnusableRow(
            f"device {row.text('device')!r} is not known; `windlass machines` lists those that are"
        )
    check_numbers(row)
    assumptions: list[str] = []
    cluster, image = find_cluster(row), image_model(row.text("model"))
    if image is not None:
        shape, configs = image_shape(image), [image_run_config(row)]
    else:
        shape = model_shape(row, heads, assumptions)
        _refuse_unknown_costs(row, shape, cluster.stack)
        if cluster.filled != 1.0:
            shape = replace(shape, sequence=shape.sequence * cluster.filled)
        if family in _IPU_HOSTS:
            configs = [ipu_run_config(row, shape, assumptions)]
        else:
            configs = run_configs(row, shape, cluster, assumptions)
    out_of_memory = read_word(row, "outcome", _OUTCOMES, "`ok` or `OOM`")
    seconds = None if out_of_memory else _step_seconds(row, shape, configs[0])
    peak = _peak_bytes(row)
    if seconds is None and peak is None and not out_of_memory:
        raise UnusableRow("no step time, throughput or peak memory is published")
    return PublishedRun(
        line=row.line,
        key=row.key,
        model=row.text("model"),
        machine=f"{row.text('device')} x {configs[0].devices:g}",
        family=family,
        cluster=cluster,
        shape=shape,
        config=configs[0],
        per_host=_devices_per_host(row, configs[0].devices),
        candidates=tuple(configs) if len(configs) > 1 else (),
        step_seconds=seconds,
        peak_bytes=peak,
        out_of_memory=out_of_memory,
        assumptions=tuple(assumptions),
        unread=row.unread,
    )


def _refuse_unknown_costs(row: TableRow, shape: ModelShape, stack: str) -> None:
    """Refuses a model whose layers a stack computes in a way that is not known."""
    can = load_stack(stack).can
    if shape.experts is not None and not can.expert:
        kind = f"a mixture of experts ({shown_cell(row, 'experts')})"
    elif shape.adapter and (shape.experts is not None or not can.adapters):
        kind = f"adapters ({shown_cell(row, 'lora_rank')})"
    else:
        return
    raise UnusableRow(f"{kind}, whose costs under `{stack}` are not known")


def _devices_per_host(row: TableRow, devices: float) -> float | None:
    """Devices of each host if the system's name states them consistently, else None."""
    match = _HOSTS.match(row.peek("system"))
    if not match or float(match[1]) * float(match[2]) != devices:
        return None
    row.text("system")  # read, as it counts
    return float(match[2])


def _usual_heads(rows: Sequence[TableRow]) -> dict[float, float]:
    """Width -> the most frequent number of heads in rows of that width, the first among equals."""
    stated: dict[float, Counter[float]] = {}
    for row in rows:
        try:
            width, heads = read_number(row, "hidden"), read_number(row, "heads")
        except UnusableRow:
            continue
        if width and heads:
            stated.setdefault(width, Counter())[heads] += 1
    return {width: counts.most_common(1)[0][0] for width, counts in stated.items()}


def _step_seconds(row: TableRow, shape: ModelShape, config: RunConfig) -> float | None:
    """Measured seconds of a step, computed from the throughput if no time is given."""
    seconds = read_number(row, "measured_step_s")
    if seconds:
        return seconds
    throughput, unit = read_number(row, "measured_throughput"), row.text("throughput_unit")
    if not throughput or not unit:
        return None
    (batch,) = required_numbers(row, "global_batch")
    items = batch * (shape.sequence if _TOKENS.search(unit) else 1.0)
    return items / (throughput * (config.devices if _PER_DEVICE.search(unit) else 1.0))


def _peak_bytes(row: TableRow) -> float | None:
    gigabytes, gib = read_number(row, "peak_memory_gb"), read_number(row, "peak_memory_gib")
    if gigabytes:
        return gigabytes * _GIGABYTE
    return gib * _GIB if gib else None
