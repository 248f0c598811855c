"""One published training run as model shape, configuration and device; and many as columns."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from windlass.validation.formulas import Column, block_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a transformer, or of an image model, that decide its cost."""

    layers: float
    width: float
    heads: float
    sequence: float
    vocabulary: float
    kv_head_share: float = 1.0
    """Key-value heads over query heads."""
    ffn: float = 0.0
    """Inner width of the feed-forward network; 0 means four times the width."""
    ffn_matrices: float = 2.0
    """Weight matrices of the feed-forward network: 2, or 3 if it is gated."""
    vocabulary_matrices: float = 1.0
    """Matrices of vocabulary by width: 1 if embedding and head are tied, else 2."""
    head_position_share: float = 1.0
    """Share of the positions for which the head computes logits; a masked model's masked share."""
    image_flop: float = 0.0
    """FLOP of one image's forward pass through an image model; 0 for a transformer."""
    image_parameters: float = 0.0
    """Parameters of an image model; 0 for a transformer."""

    @property
    def ffn_width(self) -> float:
        """Inner width of the feed-forward network."""
        return self.ffn or 4.0 * self.width

    @property
    def parameters_per_block(self) -> float:
        """Parameters of one transformer block."""
        return float(
            block_parameters(self.width, self.ffn_width, self.kv_head_share, self.ffn_matrices)
        )

    @property
    def vocabulary_parameters(self) -> float:
        """Parameters of embedding and head."""
        return self.vocabulary_matrices * self.vocabulary * self.width

    @property
    def parameters(self) -> float:
        """Parameters of the whole model, biases and norms not counted."""
        return (
            self.layers * self.parameters_per_block
            + self.vocabulary_parameters
            + self.image_parameters
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How a run is parallelized: degrees, batch sizes, sharding, recompute and precision."""

    devices: float
    micro: float
    """Sequences in a micro-batch."""
    accumulation: float
    """Micro-batches of one replica in a step."""
    tensor: float = 1.0
    context: float = 1.0
    pipeline: float = 1.0
    virtual_stages: float = 1.0
    replicas: float = 1.0
    """Data-parallel degree."""
    recompute_share: float = 0.0
    """Share of a forward pass that is recomputed, 0 to 1; full recompute is 1."""
    selective_recompute: float = 0.0
    """1 if only attention is recomputed."""
    sequence_parallel: float = 0.0
    """1 if norms and dropouts are split along the sequence over tensor-parallel ranks."""
    zero: float = 0.0
    """ZeRO stage: 0 none, 1 optimizer state, 2 gradients too, 3 parameters too."""
    async_tensor_parallel: float = 0.0
    """1 if tensor-parallel collectives overlap with matrix products."""
    float8: float = 0.0
    """1 if products run in 8 bits with one scale a tensor, 2 with one scale a row."""
    fp32_gradients: float = 0.0
    """1 if gradients are summed in float32 beside 16-bit ones."""
    balanced_embedding: float = 0.0
    """1 if embedding and head count as one layer each when layers are assigned to stages."""
    max_stage_layers: float = 0.0
    """Layers of the fullest pipeline stage on IPUs."""
    old_software: float = 0.0
    """1 if the run predates an update of its stack's software."""
    optimizer_off_chip: float = 0.0
    """1 if the optimizer state lies in memory outside the chip."""
    stage_halves: tuple[int, ...] = ()
    """Halves of blocks of each pipeline stage; empty if blocks are whole and spread evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDevice:
    """What a law needs to know of a device and its host; rates in bytes/s and FLOP/s."""

    law: str
    """Which law applies: `gpu`, `ipu` or `weight_streaming`."""
    peak: float
    """Dense FLOP/s in 16 bits."""
    peak8: float = 0.0
    """Dense FLOP/s in 8 bits; 0 if the device has none."""
    memory_rate: float
    capacity: float
    """Bytes that a process can allocate."""
    processors: float = 1.0
    """Streaming multiprocessors, or tiles of an IPU."""
    clock: float = 1e9
    """Cycles a second."""
    per_host: float = 8.0
    """Devices in each host."""
    intra_host_rate: float = 1e12
    """Bytes/s of one device to others of its host, in one direction."""
    rack_rate: float = 1e12
    """Bytes/s between two hosts of a rack over the devices' own links, in one direction."""
    network_rate: float = 1e12
    """Bytes/s of all network cards of a host together, in one direction."""
    network_cards: float = 8.0
    """Network cards of a host; if there are fewer than devices, neighbours share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One row of a table as a training run."""

    line: int
    """Line number in its file."""
    key: str
    """Fingerprint of the row; tells calibration rows from test rows."""
    model: str
    machine: str
    """Device and their number; with `model` it names the group within which runs are ranked."""
    device: str
    """Name of the device in `devices.toml`."""
    stack: str
    """Name of the software stack in `stacks.toml`."""
    shape: ModelShape
    config: RunConfig
    per_host: float | None = None
    """Devices in each host; None means as many as the device usually has."""
    candidates: tuple[RunConfig, ...] = ()
    """Configurations that an incomplete row may mean; the fastest that fits is predicted."""
    step_seconds: float | None = None
    """Measured step time; None if not published."""
    peak_bytes: float | None = None
    """Measured peak memory; None if not published."""
    out_of_memory: bool = False
    """Whether the run ran out of memory."""
    assumptions: tuple[str, ...] = ()
    """A sentence for each value that the row does not state."""

    @property
    def group(self) -> tuple[str, str]:
        """Model and machine: a planner chooses among the runs of one group."""
        return self.model, self.machine


class RunColumns:
    """Runs as columns: `columns.layers` is an array [run].

    Args:
        shapes: model shape of each run.
        configs: configuration of each run.
        devices: device of each run.
    """

    def __init__(
        self,
        shapes: Sequence[ModelShape],
        configs: Sequence[RunConfig],
        devices: Sequence[PublishedDevice],
    ) -> None:
        self._columns: dict[str, Column] = {}
        self._add(shapes, ModelShape)
        self._add(configs, RunConfig)
        self._add(devices, PublishedDevice)
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

    def _add(self, values: Sequence[object], type_: type) -> None:
        for field in fields(type_):
            if field.name not in ("law", "stage_halves"):
                column = [getattr(value, field.name) for value in values]
                self._columns[field.name] = np.array(column, dtype=float)
