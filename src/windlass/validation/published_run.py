"""Run: one published training run as model, cut and device; and many of them as columns."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from windlass.validation.formulas import Column, block_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A chain of transformer blocks, or an image model, as far as its cost goes."""

    layers: float
    width: float
    heads: float
    sequence: float
    vocabulary: float
    kv_head_share: float = 1.0
    """Key heads over heads."""
    ffn: float = 0.0
    """Hidden width of the feed-forward part; 0 means four times the width."""
    ffn_matrices: float = 2.0
    """Of the feed-forward part: 2, or 3 of a gated unit."""
    vocabulary_matrices: float = 1.0
    """Tables of vocabulary by width: 1 where embedding and head share one, else 2."""
    head_position_share: float = 1.0
    """Share of the positions that the head computes: 1, or what a masked model hides."""
    image_flop: float = 0.0
    """Of one image's forward pass through an image model; 0 of a transformer."""
    image_parameters: float = 0.0

    @property
    def ffn_width(self) -> float:
        """Hidden width of the feed-forward part."""
        return self.ffn or 4.0 * self.width

    @property
    def parameters_per_block(self) -> float:
        """Weights of one block."""
        return float(
            block_parameters(self.width, self.ffn_width, self.kv_head_share, self.ffn_matrices)
        )

    @property
    def vocabulary_parameters(self) -> float:
        """Weights of embedding and head."""
        return self.vocabulary_matrices * self.vocabulary * self.width

    @property
    def parameters(self) -> float:
        """All weights that are products' factors, and tables."""
        return (
            self.layers * self.parameters_per_block
            + self.vocabulary_parameters
            + self.image_parameters
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How a run lies on its devices."""

    devices: float
    micro: float
    """Sequences of one micro-batch."""
    accumulation: float
    """Micro-batches of one replica a step."""
    tensor: float = 1.0
    context: float = 1.0
    pipeline: float = 1.0
    virtual_stages: float = 1.0
    replicas: float = 1.0
    recompute_share: float = 0.0
    """Share of a forward pass that is computed again: 1 with full recompute, else 0 to 1."""
    selective_recompute: float = 0.0
    """1 where attention alone is computed again (selective recompute)."""
    sequence_parallel: float = 0.0
    """1 where norms and dropouts are cut along the sequence too."""
    zero: float = 0.0
    """What replicas share: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
    async_tensor_parallel: float = 0.0
    """1 where exchanges of slices run beside products (asynchronous tensor parallelism)."""
    float8: float = 0.0
    """1 where products are in 8 bits with one scale a tensor, 2 with one a row."""
    fp32_gradients: float = 0.0
    """1 where gradients are summed in float32 beside 16-bit ones."""
    balanced_embedding: float = 0.0
    """1 where embedding and head count as a layer each when stages are filled."""
    max_stage_layers: float = 0.0
    """Layers of the fullest stage where the row places them by hand."""
    old_software: float = 0.0
    """1 where it ran before its stack's software was renewed."""
    optimizer_off_chip: float = 0.0
    """1 where optimizer state lives off the chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDevice:
    """What a law needs of a device and the hosts around it; rates in bytes/s and FLOP/s."""

    law: str
    """Which law: `gpu`, `pod` or `stream`."""
    peak: float
    """Dense, 16 bit."""
    peak8: float = 0.0
    """Dense, 8 bit; 0 where it has none."""
    memory_rate: float
    capacity: float
    """Bytes that a process can have."""
    processors: float = 1.0
    clock: float = 1e9
    """Cycles a second."""
    per_host: float = 8.0
    intra_host_rate: float = 1e12
    """Bytes/s of one device to others of its host, one direction."""
    rack_rate: float = 1e12
    """Bytes/s from one host to the next in a rack over links of the devices' own, one direction."""
    network_rate: float = 1e12
    """Bytes/s of all network cards of a host, one direction."""
    network_cards: float = 8.0
    """Network cards of a host: where there are fewer than devices, neighbours share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One row of a table, expressed."""

    line: int
    """Where it stands in its file."""
    key: str
    """Fingerprint of its content: how calibration rows are told from test rows."""
    model: str
    machine: str
    """Device and count: with `model` the group within which plans are ranked."""
    device: str
    """Its name in `devices.toml`."""
    stack: str
    """Its name in `stacks.toml`."""
    shape: ModelShape
    config: RunConfig
    per_host: float | None = None
    """Devices of a host where the row tells of another number than the device's; else None."""
    candidates: tuple[RunConfig, ...] = ()
    """Cuts that a row which leaves something open may mean: the fastest that fits counts."""
    step_seconds: float | None = None
    """Measured; None where not published."""
    peak_bytes: float | None = None
    """Measured; None where not published."""
    out_of_memory: bool = False
    """It ran out of memory."""
    assumptions: tuple[str, ...] = ()
    """What the row does not say and was taken."""

    @property
    def group(self) -> tuple[str, str]:
        """Runs of one model on one machine, among which a planner chooses."""
        return self.model, self.machine


class RunColumns:
    """Runs as columns: `columns.layers` is an array with one number a run.

    Args:
        shapes: of the models.
        cuts: of the runs.
        devices: that they run on.
    """

    def __init__(
        self,
        shapes: Sequence[ModelShape],
        cuts: Sequence[RunConfig],
        devices: Sequence[PublishedDevice],
    ) -> None:
        self._columns: dict[str, Column] = {}
        self._take(shapes, ModelShape)
        self._take(cuts, RunConfig)
        self._take(devices, PublishedDevice)
        self._columns |= {
            "ffn_width": np.array([shape.ffn_width for shape in shapes]),
            "parameters_per_block": np.array([shape.parameters_per_block for shape in shapes]),
            "vocabulary_parameters": np.array([shape.vocabulary_parameters for shape in shapes]),
        }

    def __getattr__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise AttributeError(name) from None

    def _take(self, values: Sequence[object], of: type) -> None:
        for field in fields(of):
            if field.name != "law":
                found = [getattr(value, field.name) for value in values]
                self._columns[field.name] = np.array(found, dtype=float)
