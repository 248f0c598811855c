"""The parallel configuration of a row's run, or the configurations that the row may mean."""

import re
from dataclasses import replace

from windlass.schema import Recompute
from windlass.validation.clusters import Cluster
from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    leading_count,
    leading_number,
    read_count,
    required_numbers,
)
from windlass.validation.published_run import ModelShape, RunConfig

_MICROBATCHES = (1.0, 2.0, 4.0, 8.0)
_VIRTUAL_STAGES = (1.0, 2.0, 3.0, 4.0)
_SPLIT = {
    "stages": "as many micro-batches as pipeline stages assumed",
    "fastest": "the fastest that fits assumed",
}


def run_configs(
    row: TableRow, shape: ModelShape, cluster: Cluster, assumptions: list[str]
) -> list[RunConfig]:
    """The configurations that a row may mean: one unless it leaves something open.

    Args:
        row: one row of a table.
        shape: shape of its model.
        cluster: cluster that it ran on.
        assumptions: receives a sentence for each value that is assumed.

    Raises:
        UnusableRow: the row lacks a necessary value, or contradicts itself.
    """
    batch, devices = required_numbers(row, "global_batch", "n_devices")
    stated = _stated_config(row, devices, cluster)
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


def _stated_config(row: TableRow, devices: float, cluster: Cluster) -> RunConfig:
    """What the row states itself; micro-batch and virtual stages are filled in later."""
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
    notes, recompute = row.text("notes"), row.text("recompute").lower()
    precision = row.text("precision").lower()
    float8 = bool(re.search(r"(fp|float)8", precision))
    return RunConfig(
        devices=devices,
        micro=1.0,
        accumulation=1.0,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        replicas=replicas,
        recompute=_recompute(recompute),
        sequence_parallel=row.text("sequence_parallel").lower() in {"yes", "true", "1"},
        zero=zero,
        async_tensor_parallel=bool(re.search(r"async ?tp", notes, re.IGNORECASE)),
        float8=("row" if "row" in precision else "tensor") if float8 else None,
        fp32_gradients="fp32 grad" in precision,
        balanced_embedding="embedding balanced" in notes,
        old_software=cluster.old_software is not None
        and bool(re.search(cluster.old_software, notes)),
    )


def _recompute(stated: str) -> Recompute:
    if stated.startswith(("full", "yes")):
        return "full"
    return "selective" if stated.startswith("sel") else "none"


def _microbatches(
    row: TableRow,
    replica_batch: float,
    stages: float,
    cluster: Cluster,
    assumptions: list[str],
) -> tuple[float, ...]:
    """Micro-batch sizes into which a replica's batch of so many sequences may be split."""
    stated = read_count(row, "microbatch")
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
    if stages == 1 or not row.text("interleave"):
        return (1.0,)
    assumptions.append("virtual stages not published: the fastest number assumed")
    layers_per_stage = shape.layers / stages
    return tuple(v for v in _VIRTUAL_STAGES if layers_per_stage % v == 0) or (1.0,)
