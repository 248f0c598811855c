"""The parallel configuration of a row's run, or the configurations that the row may mean."""

import re
from dataclasses import replace
from typing import Literal, NamedTuple

from windlass.schema import Recompute
from windlass.validation.clusters import Cluster
from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    leading_count,
    read_count,
    read_number,
    read_word,
    required_numbers,
    shown_cell,
)
from windlass.validation.published_run import ModelShape, RunConfig

_ROUNDED = 0.01
"""Difference between two numbers of a row that rounding explains."""
_MICROBATCHES = (1.0, 2.0, 4.0, 8.0)
_VIRTUAL_STAGES = (1.0, 2.0, 3.0, 4.0)
_ZERO_STAGES = {"": 0.0, "0": 0.0, "1": 1.0, "2": 2.0, "3": 3.0}
_RECOMPUTE: dict[str, Recompute] = {
    "": "none", "none": "none", "no": "none", "sel": "selective", "selective": "selective",
    "full": "full", "yes": "full",
}  # fmt: skip
_YES_OR_NO = {"": False, "no": False, "false": False, "0": False} | {
    "yes": True, "true": True, "1": True,
}  # fmt: skip
_PRECISION_WORDS = {
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16"), "16 bits"),
    **dict.fromkeys(("fp8", "float8", "mxfp8"), "float8"),
    **dict.fromkeys(("fp4", "float4", "nvfp4"), "float4"),
    **dict.fromkeys(("linear", "tensor", "tensorwise", "row", "rowwise", "cs", "ds"), ""),
    **dict.fromkeys(("fp32", "grad", "accum"), ""),
}
"""Words of a precision with the format that they name, if any; `cs` and `ds` are NVIDIA's recipes
of current and of delayed scaling."""
_SPLIT = {
    "stages": "as many micro-batches as pipeline stages assumed",
    "fastest": "the fastest that fits assumed",
}


def run_configs(
    row: TableRow, shape: ModelShape, cluster: Cluster, assumptions: list[str]
) -> list[RunConfig]:
    """The configurations that a row may mean: one unless it leaves something open.

    Raises:
        UnusableRow: the row lacks a necessary value, or contradicts itself.
    """
    batch, devices = required_numbers(row, "global_batch", "n_devices")
    stated = _stated_config(row, shape, devices, cluster, assumptions)
    replicas = stated.replicas
    micros = _microbatches(row, batch / replicas, stated.pipeline, cluster, assumptions)
    virtual_stages = _virtual_stages(row, shape, stated.pipeline, assumptions)
    return [
        replace(
            stated, micro=micro, accumulation=max(1.0, batch / replicas / micro), virtual_stages=v
        )
        for micro in micros
        for v in virtual_stages
    ]


def _stated_config(
    row: TableRow, shape: ModelShape, devices: float, cluster: Cluster, assumptions: list[str]
) -> RunConfig:
    """What the row states itself; micro-batch and virtual stages are filled in later."""
    zero = _zero_stage(row)
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
    notes, precision = row.text("notes"), _precision(row, assumptions)
    expert = _expert_degree(row, shape, tensor, replicas * context, assumptions)
    return RunConfig(
        devices=devices,
        micro=1.0,
        accumulation=1.0,
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=pipeline,
        replicas=replicas,
        recompute=read_word(row, "recompute", _RECOMPUTE, "none, selective or full"),
        sequence_parallel=read_word(row, "sequence_parallel", _YES_OR_NO, "yes or no"),
        zero=zero,
        async_tensor_parallel=bool(re.search(r"async ?tp", notes, re.IGNORECASE)),
        float8=precision.float8,
        float4=precision.float4,
        fp32_gradients=precision.fp32_gradients,
        balanced_embedding="embedding balanced" in notes,
        old_software=cluster.old_software is not None
        and bool(re.search(cluster.old_software, notes)),
    )


def _expert_degree(
    row: TableRow, shape: ModelShape, tensor: float, replicas: float, assumptions: list[str]
) -> float:
    """Replicas that divide the experts, which tensor-parallel ranks have divided before."""
    if shape.experts is None:
        return 1.0
    stated = read_count(row, "expert_parallel")
    if stated is None:
        assumptions.append("expert parallelism not published: none assumed")
        return 1.0
    degree = max(1.0, stated / tensor)
    if replicas % degree or shape.experts.count % degree:
        raise UnusableRow(
            f"`expert_parallel` = {stated:g} does not divide the {replicas:g} replicas and the "
            f"{shape.experts.count} experts of a layer"
        )
    return degree


def _zero_stage(row: TableRow) -> float:
    """The ZeRO stage of a row, whose cell begins with it."""
    if "offload" in row.text("zero").lower():
        raise UnusableRow(f"{shown_cell(row, 'zero')}: no stack's costs have its offload")
    return read_word(row, "zero", _ZERO_STAGES, "a ZeRO stage from 0 to 3")


class _Precision(NamedTuple):
    """What a row's precision decides."""

    float8: Literal["tensor", "row"] | None
    float4: bool
    fp32_gradients: bool


def _precision(row: TableRow, assumptions: list[str]) -> _Precision:
    """The precision of a row; a word that is not known refuses it."""
    words = re.findall(r"[a-z0-9]+", row.text("precision").lower().replace("amp_", ""))
    unknown = [word for word in words if word not in _PRECISION_WORDS]
    formats = {_PRECISION_WORDS[word] for word in words if word not in unknown} - {""}
    if unknown or len(formats) > 1 or (words and not formats):
        raise UnusableRow(
            f"{shown_cell(row, 'precision')} is no precision that stacks are priced in: those are "
            "bf16, fp16, fp8, scaled by tensor or by row, and nvfp4, perhaps with `fp32 grad accum`"
        )
    if not words and "precision" in row.cells:
        assumptions.append("a 16-bit precision assumed")
    if "mxfp8" in words:
        assumptions.append("mxfp8 priced as fp8 with a scale for each tensor")
    is_float8 = formats == {"float8"}
    scaled: Literal["tensor", "row"] = "row" if {"row", "rowwise"} & {*words} else "tensor"
    return _Precision(scaled if is_float8 else None, formats == {"float4"}, "grad" in words)


def _microbatches(
    row: TableRow,
    replica_batch: float,
    stages: float,
    cluster: Cluster,
    assumptions: list[str],
) -> tuple[float, ...]:
    """Micro-batch sizes into which a replica's batch of so many sequences may be split."""
    stated, accumulation = read_count(row, "microbatch"), read_number(row, "grad_accum")
    if accumulation:
        micro = replica_batch / accumulation
        if stated and abs(stated / micro - 1) > _ROUNDED:
            raise UnusableRow(
                f"a replica's {replica_batch:g} sequences in `grad_accum` = {accumulation:g} parts "
                f"are {micro:g} each, but `microbatch` = {stated:g}"
            )
        return (stated or micro,)
    if stated and (stages == 1 or stated < replica_batch):
        return (stated,)
    split = _SPLIT[cluster.microbatch_split]
    if stated:
        assumptions.append(f"`microbatch` {stated:g} is a replica's whole batch: {split}")
    else:
        assumptions.append(f"micro-batch not published: {split}")
    if cluster.microbatch_split == "stages":
        return (max(1.0, replica_batch / stages),)
    return tuple(micro for micro in _MICROBATCHES if micro <= max(1.0, replica_batch))


def _virtual_stages(
    row: TableRow, shape: ModelShape, stages: float, assumptions: list[str]
) -> tuple[float, ...]:
    stated = leading_count(row, "interleave")
    if stated:
        return (stated,)
    text = row.text("interleave")
    if text and "not stated" not in text:
        raise UnusableRow(f"{shown_cell(row, 'interleave')} is not a number of virtual stages")
    if stages == 1 or not text:
        return (1.0,)
    assumptions.append("virtual stages not published: the fastest number assumed")
    layers_per_stage = shape.layers / stages
    return tuple(v for v in _VIRTUAL_STAGES if layers_per_stage % v == 0) or (1.0,)
