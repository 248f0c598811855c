"""Cuts: how a row's run lies on its devices, or the ways in which it may."""

import re
from dataclasses import replace

from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    leading_number,
    read_count,
    required_numbers,
)
from windlass.validation.laws.ipu import ipu_run_config
from windlass.validation.published_run import ModelShape, RunConfig
from windlass.validation.software_stacks import SoftwareStack

_MICROS = (1.0, 2.0, 4.0, 8.0)
_INTERLEAVES = (1.0, 2.0, 3.0, 4.0)
_SPLIT = {"stages": "split in as many as there are stages", "fastest": "the fastest that fits"}
_EACH_OP = 0.5
"""Of a forward pass that torch's selective recompute per op does again: every second product and
what is no product. Source: torchtitan, `activation_checkpoint.py`."""


def run_configs(
    row: TableRow, shape: ModelShape, stack: SoftwareStack, told: list[str]
) -> list[RunConfig]:
    """The cuts that a row may mean; one unless it leaves something open.

    Args:
        row: of a table.
        shape: of its model.
        stack: that it stands for.
        told: takes a sentence for each thing that had to be taken.

    Raises:
        Unsaid: what the row does not say, or that it contradicts itself.
    """
    if stack.law == "ipu":
        return [ipu_run_config(row, shape, told)]
    batch, devices = required_numbers(row, "global_batch", "n_devices")
    whole = _whole(row, devices, stack)
    replicas = whole.replicas
    micros = _micros(row, batch / replicas, whole.pipeline, stack, told)
    interleaves = _interleaves(row, shape, whole.pipeline, told)
    return [
        replace(
            whole, micro=micro, accumulation=max(1.0, batch / replicas / micro), virtual_stages=v
        )
        for micro in micros
        for v in interleaves
    ]


def _whole(row: TableRow, devices: float, stack: SoftwareStack) -> RunConfig:
    """The cut without what may be open."""
    zero = leading_number(row, "zero") or 0.0
    tensor, pipeline = read_count(row, "t"), read_count(row, "p")
    if not tensor or not pipeline:
        if zero < 3 and devices > 1:
            raise UnusableRow("`t`, `p` not published")
        tensor, pipeline = tensor or 1.0, pipeline or 1.0
    context = read_count(row, "context_parallel") or 1.0
    replicas = read_count(row, "d") or devices / (tensor * pipeline * context)
    if abs(tensor * pipeline * context * replicas - devices) > 0.5:
        raise UnusableRow(
            f"t x p x d = {tensor * pipeline * context * replicas:g}, but `n_devices` = {devices:g}"
        )
    notes, again = row.text("notes"), row.text("recompute").lower()
    precision = row.text("precision").lower()
    eight = bool(re.search(r"(fp|float)8", precision))
    return RunConfig(
        devices=devices,
        micro=1.0,
        accumulation=1.0,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        replicas=replicas,
        recompute_share=_again(again),
        selective_recompute=float(again.startswith("sel") and _again(again) == 0),
        sequence_parallel=float(row.text("sequence_parallel").lower() in {"yes", "true", "1"}),
        zero=zero,
        async_tensor_parallel=float(bool(re.search(r"async ?tp", notes, re.IGNORECASE))),
        float8=(2.0 if "row" in precision else 1.0) if eight else 0.0,
        fp32_gradients=float("fp32 grad" in precision),
        balanced_embedding=float("embedding balanced" in notes),
        old_software=float(
            stack.old_software is not None and bool(re.search(stack.old_software, notes))
        ),
    )


def _again(recompute: str) -> float:
    if recompute.startswith(("full", "yes")):
        return 1.0
    each_op = recompute.startswith("sel") and ("op" in recompute or "default" in recompute)
    return _EACH_OP if each_op else 0.0


def _micros(
    row: TableRow, mine: float, stages: float, stack: SoftwareStack, told: list[str]
) -> tuple[float, ...]:
    """Micro-batches that a replica's batch of `mine` sequences may be split in."""
    stated = read_count(row, "microbatch")
    if stated and (stages == 1 or stated < mine):
        return (stated,)
    if stated:
        told.append(
            f"`microbatch` {stated:g} is a replica's whole batch: {_SPLIT[stack.microbatch_split]}"
        )
    else:
        told.append(f"micro-batch not published: {_SPLIT[stack.microbatch_split]}")
    if stack.microbatch_split == "stages":
        return (max(1.0, mine / stages),)
    return tuple(micro for micro in _MICROS if micro <= max(1.0, mine))


def _interleaves(
    row: TableRow, shape: ModelShape, stages: float, told: list[str]
) -> tuple[float, ...]:
    stated = leading_number(row, "interleave")
    if stated:
        return (stated,)
    if stages == 1 or not row.text("interleave"):
        return (1.0,)
    told.append("interleave not published: the fastest")
    each = shape.layers / stages
    return tuple(v for v in _INTERLEAVES if each % v == 0) or (1.0,)
