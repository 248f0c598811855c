"""The configuration of a run on IPU pods: packed sequences, and stages of half blocks."""

import json
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import ceil

from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    read_count,
    read_number,
    required_numbers,
)
from windlass.validation.published_run import ModelShape, RunConfig

_PACKED = re.compile(r"avg_seq_per_pack=(\d+(?:\.\d+)?)")
_PLACED = re.compile(r"layers_per_ipu\)=(\[[\[\]0-9, ]*\])")
_PACKS, _SHORT_PACKS, _SHORT = 2.0, 1.17, 128.0
"""Sequences in one pack of BERT's 512 positions, and of 128. Source: Krell et al. 2021,
arXiv:2107.02027."""
_TOKENS = 1024.0
"""Tokens of a micro-batch if none is published, as in Graphcore's MLPerf submissions."""
_HEAD_STAGE = 0.5
"""Share of a stage that embedding and head take if no placement is published. Source: Graphcore's
MLPerf submissions."""
_STAGES = (4, 8, 16)
"""Numbers of pipeline stages that Graphcore uses for transformers."""


def ipu_run_config(row: TableRow, shape: ModelShape, assumptions: list[str]) -> RunConfig:
    """The configuration of a row on IPUs; if it does not state its stages, Graphcore's are assumed.

    A micro-batch holds packs, each as long as the model's sequence. All replicas share optimizer
    state (replicated tensor sharding), and stages recompute what they do.

    Args:
        assumptions: receives a sentence for each value that is assumed.

    Raises:
        UnusableRow: the row does not say its batch or devices, or contradicts itself.
    """
    batch, devices = required_numbers(row, "global_batch", "n_devices")
    notes = row.text("notes")
    packed = _PACKED.search(notes)
    packs = float(packed[1]) if packed else _packs(row, shape)
    accumulation = read_count(row, "grad_accum") or 0.0
    pipeline = round(read_count(row, "p") or 0.0)
    application = None if pipeline > 1 or accumulation else _application(row)
    if application is not None:
        pipeline = len(application.blocks)
        assumptions.append(f"stages as in Graphcore's application: {list(application.blocks)}")
    elif pipeline <= 1:
        pipeline = _stages(batch, devices, packs * accumulation)
        assumptions.append(f"stages not published: {pipeline} assumed")
    replicas = devices / pipeline
    if not accumulation:
        usual = application.micro.get(f"{shape.sequence:g}") if application else None
        stated = read_number(row, "microbatch") or usual or max(1.0, _TOKENS // shape.sequence)
        accumulation = max(1.0, batch / (replicas * stated * packs))
        assumptions.append(f"micro-batch not published: {stated:g} assumed")
    micro = round(batch / (replicas * accumulation * packs))
    if micro < 1:
        raise UnusableRow(
            f"batch {batch:g} over {replicas:g} replicas x {accumulation:g} micro-batches"
        )
    return RunConfig(
        devices=devices, micro=micro, accumulation=batch / (replicas * packs * micro),
        pipeline=pipeline,
        replicas=replicas, recompute="full", zero=1.0,
        optimizer_off_chip=(
            application.off_chip if application else "offchip=True" in notes
        ),
        stage_halves=(
            application.stage_halves
            if application
            else stage_halves(notes, round(shape.layers), pipeline)
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Application:
    """How one of Graphcore's applications places a model."""

    model: str
    notes: str = ""
    blocks: list[int]
    micro: dict[str, float]
    off_chip: bool

    @property
    def stage_halves(self) -> tuple[int, ...]:
        """Halves of blocks of each stage; the first IPU's come last, beside the head."""
        return tuple(2 * count for count in (*self.blocks[1:], self.blocks[0]))


@cache
def _applications() -> tuple[_Application, ...]:
    text = files("windlass.validation").joinpath("ipu_applications.toml").read_text("utf-8")
    return tuple(_Application(**table) for table in tomllib.loads(text).values())


def _application(row: TableRow) -> _Application | None:
    """The application that a row of Graphcore's performance page ran; None if it is another."""
    if "graphcore" not in row.text("source"):
        return None
    return next(
        (
            each
            for each in _applications()
            if re.search(each.model, row.text("model")) and re.search(each.notes, row.text("notes"))
        ),
        None,
    )


def _stages(batch: float, devices: float, together: float) -> int:
    """The smallest number of stages with which a micro-batch holds whole packs, 4 by default."""
    fitting = [stages for stages in _STAGES if devices % stages == 0]
    whole = [p for p in fitting if together and batch * p / devices % together == 0]
    return [*whole, *fitting, 1][0]


def _packs(row: TableRow, shape: ModelShape) -> float:
    """Sequences in a pack; 1 without packing."""
    if "pack" not in row.text("notes") and "training_results" not in row.text("source"):
        return 1.0
    return _SHORT_PACKS if shape.sequence <= _SHORT else _PACKS


def stage_halves(notes: str, layers: int, stages: int) -> tuple[int, ...]:
    """Halves of blocks of each stage, as the row places them, else evenly.

    A placement is a list of blocks a stage, or of [stage, [attentions, feed-forwards]]. The first
    IPU holds embedding and head, and blocks go around: its own come last.

    Raises:
        UnusableRow: the placement has another number of stages or blocks.
    """
    placed = _PLACED.search(notes)
    if not placed:
        return _even_halves(layers, stages)
    counts: list[int] = []
    for stage in json.loads(placed[1]):
        match stage:
            case int():
                counts.append(2 * stage)
            case [int(), [int(attentions), int(forwards)]]:
                counts.append(attentions + forwards)
    if isinstance(json.loads(placed[1])[0], int):
        counts = [*counts[1:], counts[0]]
    if len(counts) != stages or sum(counts) != 2 * layers:
        raise UnusableRow(
            f"a placement of {sum(counts) / 2:g} blocks on {len(counts)} stages, but {layers} "
            f"layers and `p` = {stages}"
        )
    return tuple(counts)


def _even_halves(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages, of which the last is shorter by what embedding and head take."""
    full = ceil(2 * layers / max(1.0, stages - _HEAD_STAGE))
    before = [max(0, min(full, 2 * layers - full * at)) for at in range(stages - 1)]
    return (*before, 2 * layers - sum(before))
