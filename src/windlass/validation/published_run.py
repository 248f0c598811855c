"""One published training run: model shape, configuration, and where it ran."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from windlass.capture import ImageModel
from windlass.models import ExpertConfig, LatentAttention
from windlass.schema import Recompute
from windlass.validation.clusters import Cluster
from windlass.validation.csv_table import TableRow, read_count, read_number, required_numbers


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
    head_width: float = 0.0
    """Features of a head; 0 divides the width among the heads."""
    window: float = 0.0
    """Tokens that every other block sees of a sequence; 0 means that each block sees all."""
    latent: LatentAttention | None = None
    experts: ExpertConfig | None = None
    adapter: float = 0.0
    """Rank of the adapters that alone are trained; 0 trains all weights."""
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
    def query_width(self) -> float:
        """Features of the queries of all heads."""
        return self.heads * (self.head_width or self.width / self.heads)

    @property
    def parameters_per_block(self) -> float:
        """Parameters of one transformer block without experts, `2 d h (1 + k) + matrices d f`.

        h is the features of all heads, and k is key-value heads over query heads.
        """
        return self._attention_parameters + self.ffn_matrices * self.width * self.ffn_width

    @property
    def _attention_parameters(self) -> float:
        latent, heads = self.latent, self.heads
        if latent is None:
            return 2.0 * self.width * self.query_width * (1.0 + self.kv_head_share)
        made_of = latent.query_rank or self.width
        queries = made_of * heads * latent.head_width
        queries += self.width * (latent.query_rank or 0)
        keys = latent.key_rank * (self.width + heads * (latent.plain_width + latent.value_width))
        keys += self.width * latent.rotary_width
        return queries + keys + self.width * heads * latent.value_width

    def _block_parameters(self, *, used: bool) -> float:
        """Parameters of all blocks, or those that compute with a token."""
        if self.experts is None:
            return self.layers * self.parameters_per_block
        experts = self.experts
        dense = float(experts.dense_layers)
        each = experts.per_token if used else experts.count
        inner = each * experts.ffn + (experts.shared_ffn or 0)
        mixed = self.ffn_matrices * self.width * inner + self.width * experts.count
        blocks = self.layers - dense
        return dense * self.parameters_per_block + blocks * (self._attention_parameters + mixed)

    @property
    def vocabulary_parameters(self) -> float:
        """Parameters of embedding and head."""
        return self.vocabulary_matrices * self.vocabulary * self.width

    @property
    def flop_per_token(self) -> float:
        """Model FLOP of a step for each token, `6 P + 12 L h s`, recompute not counted.

        P counts the experts that a token takes; frozen weights have no gradient, `4 P`.
        Source: Chowdhery et al. 2022, PaLM, appendix B.
        """
        latent = self.latent
        width = self.query_width if latent is None else self.heads * latent.mean_width
        scores = 12.0 * self.layers * width * self.sequence
        used = self._block_parameters(used=True) + self.vocabulary_parameters
        each = 4.0 if self.adapter else 6.0
        return each * (used + self.image_parameters) + scores + 3.0 * self.image_flop

    @property
    def parameters(self) -> float:
        """Parameters of the whole model, biases and norms not counted."""
        return (
            self._block_parameters(used=False) + self.vocabulary_parameters + self.image_parameters
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
    expert: float = 1.0
    """Replicas that divide the experts, which tensor-parallel ranks have divided before."""
    pipeline: float = 1.0
    virtual_stages: float = 1.0
    replicas: float = 1.0
    """Data-parallel degree."""
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    """Whether norms and dropouts are split along the sequence over tensor-parallel ranks."""
    zero: float = 0.0
    """ZeRO stage: 0 none, 1 optimizer state, 2 gradients too, 3 parameters too."""
    async_tensor_parallel: bool = False
    """Whether tensor-parallel collectives overlap with matrix products."""
    float8: Literal["tensor", "row"] | None = None
    """What has a scale of its own if products run in 8 bits; None if they do not."""
    float4: bool = False
    """Whether products run in 4 bits."""
    fp32_gradients: bool = False
    """Whether gradients are summed in float32 beside 16-bit ones."""
    balanced_embedding: bool = False
    """Whether embedding and head count as one layer each when layers are assigned to stages."""
    old_software: bool = False
    """Whether the run predates an update of its stack's software."""
    optimizer_off_chip: bool = False
    """Whether the optimizer state lies in memory outside the chip."""
    stage_halves: tuple[int, ...] = ()
    """Halves of blocks of each pipeline stage; empty if blocks are whole and spread evenly."""

    @property
    def narrow(self) -> Literal["float8", "float4"] | None:
        """What factors of products are narrowed to; None if they have 16 bits."""
        return "float4" if self.float4 else "float8" if self.float8 else None


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
    family: str
    """Host family of its machine in the catalog."""
    cluster: Cluster
    """Where and with which software it ran."""
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
    unread: tuple[str, ...] = ()
    """Columns of the row that say something of what ran, and that its prediction leaves out."""

    @property
    def group(self) -> tuple[str, str]:
        """Model and machine: a planner chooses among the runs of one group."""
        return self.model, self.machine


_IPU_IMAGES = 20.0
"""Images in a micro-batch on an IPU if none is published, as in Graphcore's MLPerf submissions."""


@cache
def image_model(name: str) -> ImageModel | None:
    """The image model that a row names; None if it is not a known one."""
    text = files("windlass.validation").joinpath("models.toml").read_text(encoding="utf-8")
    for key, known in tomllib.loads(text).items():
        if re.search(known["match"], name, re.IGNORECASE):
            return ImageModel(
                name=key,
                flop=known["flop"],
                activations=known["activations"],
                parameters=int(known["parameters"]),
                convolutions=known["convolutions"],
            )
    return None


def image_shape(model: ImageModel) -> ModelShape:
    """The shape of an image model, whose sequence is one token."""
    return ModelShape(
        layers=0.0, width=1.0, heads=1.0, sequence=1.0, vocabulary=0.0,
        image_flop=model.flop, image_parameters=float(model.parameters),
    )  # fmt: skip


def image_run_config(row: TableRow) -> RunConfig:
    """A configuration in which every device is a replica.

    Raises:
        UnusableRow: the row does not state its batch or its devices.
    """
    batch, devices = required_numbers(row, "global_batch", "n_devices")
    accumulation = read_count(row, "grad_accum")
    if not accumulation:
        usual = _IPU_IMAGES if "IPU" in row.text("device") else batch / devices
        stated = read_number(row, "microbatch") or usual
        accumulation = max(1.0, batch / devices / stated)
    return RunConfig(
        devices=devices, replicas=devices, accumulation=accumulation,
        micro=batch / devices / accumulation,
    )  # fmt: skip
