"""Step time of transformers on IPUs, in bulk-synchronous pipelines with data parallelism.

Devices compute, then exchange, then compute: nothing overlaps. A pipeline's slot is its fullest
stage's forward, recompute and backward pass of one micro-batch; after the last slot gradients are
summed over the replicas and the optimizer updates weights whose state lies on or off the chip.
"""

import json
import re
from collections.abc import Mapping

import numpy as np

from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    read_count,
    read_number,
    required_numbers,
)
from windlass.validation.formulas import Column, ColumnOrFloat, ring_bytes
from windlass.validation.published_run import ModelShape, RunColumns, RunConfig

_PACKED = re.compile(r"avg_seq_per_pack=(\d+(?:\.\d+)?)")
_PLACED = re.compile(r"layers_per_ipu\)=(\[[\[\]0-9, ]*\])")
_PACKS, _SHORT_PACKS, _SHORT = 2.0, 1.17, 128.0
"""Sequences in one pack of BERT's 512 positions, and of 128. Source: Krell et al. 2021,
arXiv:2107.02027."""
_TOKENS = 1024.0
"""Tokens of a micro-batch if none is published, as in Graphcore's MLPerf submissions."""
_TABLE_STAGES = 0.5
"""Share of a stage that embedding and head take if layers are placed by hand. The attention and the
feed-forward half of a layer may lie on different stages. Source: Graphcore's MLPerf submissions."""
_RACK = 64.0
"""IPUs of one rack, which gateway links join to others. Source: Argonne user guide."""
_STAGES = (4.0, 8.0, 16.0)
"""Numbers of pipeline stages that Graphcore uses for transformers."""


def ipu_run_config(row: TableRow, shape: ModelShape, assumptions: list[str]) -> RunConfig:
    """The configuration of a row on IPUs; if it does not state its stages, Graphcore's are assumed.

    Raises:
        UnusableRow: the row does not say its batch or devices, or contradicts itself.
    """
    batch, devices = required_numbers(row, "global_batch", "n_devices")
    notes = row.text("notes")
    packed = _PACKED.search(notes)
    packs = float(packed[1]) if packed else _packs(row, shape)
    accumulation = read_count(row, "grad_accum") or 0.0
    pipeline = read_count(row, "p") or 0.0
    if pipeline <= 1.0:
        pipeline = _stages(batch, devices, packs * accumulation)
        assumptions.append(f"stages not published: {pipeline:g} assumed")
    replicas = devices / pipeline
    if not accumulation:
        stated = read_number(row, "microbatch") or max(1.0, _TOKENS // shape.sequence)
        accumulation = max(1.0, batch / (replicas * stated * packs))
        assumptions.append(f"micro-batch not published: {stated:g} assumed")
    micro = batch / (replicas * accumulation * packs)
    if micro < 1.0 / 64.0:
        raise UnusableRow(
            f"batch {batch:g} over {replicas:g} replicas x {accumulation:g} micro-batches"
        )
    return RunConfig(
        devices=devices, micro=micro, accumulation=accumulation, pipeline=pipeline,
        replicas=replicas, recompute_share=1.0,
        max_stage_layers=max_stage_layers(notes, shape, pipeline),
        optimizer_off_chip=float("offchip=True" in notes),
    )  # fmt: skip


def _stages(batch: float, devices: float, together: float) -> float:
    """The smallest number of stages with which a micro-batch holds whole packs, 4 by default."""
    fitting = [stages for stages in _STAGES if devices % stages == 0]
    whole = [p for p in fitting if together and batch * p / devices % together == 0]
    return [*whole, *fitting, 1.0][0]


def _packs(row: TableRow, shape: ModelShape) -> float:
    """Sequences in a pack; 1 without packing."""
    if "pack" not in row.text("notes") and "training_results" not in row.text("source"):
        return 1.0
    return _SHORT_PACKS if shape.sequence <= _SHORT else _PACKS


def max_stage_layers(notes: str, shape: ModelShape, stages: float) -> float:
    """Layers of the fullest stage: as the row states, else evenly spread in halves of layers.

    A placement is a list of layers a stage, or of [stage, [attentions, feed-forwards]]; a
    feed-forward part counts for its share of a block's FLOP.
    """
    placed = _PLACED.search(notes)
    even = float(np.ceil(2.0 * shape.layers / max(1.0, stages - _TABLE_STAGES)) / 2.0)
    if not placed:
        return even
    scores = 2.0 * shape.sequence * shape.width
    share = (
        shape.ffn_matrices * shape.width * shape.ffn_width / (shape.parameters_per_block + scores)
    )
    counts = [_blocks(one, share) for one in json.loads(placed[1])]
    return max(counts, default=even) or even


def _blocks(placed: object, share: float) -> float:
    """Blocks of one stage, or 0 if this is not a placement; `share` is the feed-forward part's."""
    match placed:
        case int():
            return float(placed)
        case [int(), [int(attentions), int(forwards)]]:
            return attentions * (1.0 - share) + forwards * share
        case _:
            return 0.0


def step_terms(runs: RunColumns, given: Mapping[str, ColumnOrFloat]) -> dict[str, Column]:
    """Seconds of a step by term; their sum is the step time.

    Args:
        runs: as columns.
        given: the constants of `priors.toml`, law `ipu`.
    """
    k = {name: np.asarray(value, dtype=float) for name, value in given.items()}
    tokens = runs.micro * runs.sequence
    passes = 3.0 + runs.recompute_share
    flop = (
        runs.max_stage_layers
        * (2.0 * tokens * runs.parameters_per_block + 4.0 * tokens * runs.sequence * runs.width)
        * passes
    )
    full = tokens / (tokens + k["half_tokens"])
    products = flop / (runs.peak * k["products"] * full)
    phases = runs.max_stage_layers * passes * k["phases"] / runs.clock
    hop = 2.0 * 2.0 * tokens * runs.width / (runs.intra_host_rate * k["inner"])
    slots = runs.accumulation + runs.pipeline - 1.0
    weights = (
        runs.max_stage_layers * runs.parameters_per_block
        + runs.vocabulary_parameters / runs.pipeline
    ) * 2.0
    rings = 2.0 * ring_bytes(weights, runs.replicas) / (_ring_rate(runs) * k["ring"])
    racks = np.maximum(runs.devices / _RACK, 1.0)
    between = 2.0 * ring_bytes(weights, racks) / (runs.network_rate / runs.per_host * k["gateway"])
    off_chip = weights / 2.0 * 16.0 * runs.optimizer_off_chip / runs.replicas / k["far_rate"]
    return {
        "products": runs.accumulation * products,
        "phases": runs.accumulation * phases,
        "exchange": slots * hop,
        "pipeline": (runs.pipeline - 1.0) * (products + phases),
        "replicas": np.where(runs.replicas > 1, rings + between, 0.0),
        "update": off_chip + k["fixed"],
    }


def _ring_rate(runs: RunColumns) -> Column:
    """Bytes/s of the ring of one stage's replicas, in one direction.

    Each stage has its own ring through the replicas. If replicas lie in several hosts, all rings
    share the links between two hosts.
    """
    shared = runs.rack_rate / np.maximum(runs.pipeline, 1.0)
    several = runs.devices > runs.per_host
    return np.asarray(
        np.where(several, np.minimum(runs.intra_host_rate, shared), runs.intra_host_rate),
        dtype=float,
    )
