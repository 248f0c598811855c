"""Cuts: how a row's run lies on its devices, or the ways in which it may."""

import re
from dataclasses import replace

from windlass.validation.csv_table import Row, Unsaid, count, leading, needed
from windlass.validation.laws.ipu import pod_cut
from windlass.validation.runs import Cut, Shape
from windlass.validation.software_stacks import Stack

_MICROS = (1.0, 2.0, 4.0, 8.0)
_INTERLEAVES = (1.0, 2.0, 3.0, 4.0)
_SPLIT = {"stages": "split in as many as there are stages", "fastest": "the fastest that fits"}
_EACH_OP = 0.5
"""Of a forward pass that torch's selective recompute per op does again: every second product and
what is no product. Source: torchtitan, `activation_checkpoint.py`."""


def cuts_of(row: Row, shape: Shape, stack: Stack, told: list[str]) -> list[Cut]:
    """The cuts that a row may mean; one unless it leaves something open.

    Args:
        row: of a table.
        shape: of its model.
        stack: that it stands for.
        told: takes a sentence for each thing that had to be taken.

    Raises:
        Unsaid: what the row does not say, or that it contradicts itself.
    """
    if stack.law == "pod":
        return [pod_cut(row, shape, told)]
    batch, devices = needed(row, "global_batch", "n_devices")
    whole = _whole(row, devices, stack)
    replicas = whole.replicas
    micros = _micros(row, batch / replicas, whole.pipeline, stack, told)
    interleaves = _interleaves(row, shape, whole.pipeline, told)
    return [
        replace(whole, micro=micro, accumulation=max(1.0, batch / replicas / micro), interleave=v)
        for micro in micros
        for v in interleaves
    ]


def _whole(row: Row, devices: float, stack: Stack) -> Cut:
    """The cut without what may be open."""
    zero = leading(row, "zero") or 0.0
    tensor, pipeline = count(row, "t"), count(row, "p")
    if not tensor or not pipeline:
        if zero < 3 and devices > 1:
            raise Unsaid("`t`, `p` not published")
        tensor, pipeline = tensor or 1.0, pipeline or 1.0
    context = count(row, "context_parallel") or 1.0
    replicas = count(row, "d") or devices / (tensor * pipeline * context)
    if abs(tensor * pipeline * context * replicas - devices) > 0.5:
        raise Unsaid(
            f"t x p x d = {tensor * pipeline * context * replicas:g}, but `n_devices` = {devices:g}"
        )
    notes, again = row.text("notes"), row.text("recompute").lower()
    precision = row.text("precision").lower()
    eight = bool(re.search(r"(fp|float)8", precision))
    return Cut(
        devices=devices,
        micro=1.0,
        accumulation=1.0,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        replicas=replicas,
        again=_again(again),
        attention_again=float(again.startswith("sel") and _again(again) == 0),
        cut_sequence=float(row.text("sequence_parallel").lower() in {"yes", "true", "1"}),
        zero=zero,
        covered=float(bool(re.search(r"async ?tp", notes, re.IGNORECASE))),
        float8=(2.0 if "row" in precision else 1.0) if eight else 0.0,
        wide_gradients=float("fp32 grad" in precision),
        balanced=float("embedding balanced" in notes),
        earlier=float(stack.earlier is not None and bool(re.search(stack.earlier, notes))),
    )


def _again(recompute: str) -> float:
    if recompute.startswith(("full", "yes")):
        return 1.0
    each_op = recompute.startswith("sel") and ("op" in recompute or "default" in recompute)
    return _EACH_OP if each_op else 0.0


def _micros(
    row: Row, mine: float, stages: float, stack: Stack, told: list[str]
) -> tuple[float, ...]:
    """Micro-batches that a replica's batch of `mine` sequences may be split in."""
    stated = count(row, "microbatch")
    if stated and (stages == 1 or stated < mine):
        return (stated,)
    if stated:
        told.append(f"`microbatch` {stated:g} is a replica's whole batch: {_SPLIT[stack.split]}")
    else:
        told.append(f"micro-batch not published: {_SPLIT[stack.split]}")
    if stack.split == "stages":
        return (max(1.0, mine / stages),)
    return tuple(micro for micro in _MICROS if micro <= max(1.0, mine))


def _interleaves(row: Row, shape: Shape, stages: float, told: list[str]) -> tuple[float, ...]:
    stated = leading(row, "interleave")
    if stated:
        return (stated,)
    if stages == 1 or not row.text("interleave"):
        return (1.0,)
    told.append("interleave not published: the fastest")
    each = shape.layers / stages
    return tuple(v for v in _INTERLEAVES if each % v == 0) or (1.0,)
