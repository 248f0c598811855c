"""Step time on GPU clusters, whose devices compute and communicate at the same time.

A step consists of the slots of its pipeline, the gradient all-reduce and the update. In a layer's
pass three things run side by side: kernels, the host that launches them, and under ZeRO-3 the
all-gather of parameters; the longest counts. `priors.toml` names each constant with its unit and
meaning.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from windlass.validation.formulas import (
    Column,
    ColumnOrFloat,
    all_reduce_seconds,
    pipeline_slots,
    product_seconds,
    ring_bytes,
    ring_rate,
    smooth_max,
)
from windlass.validation.published_run import RunColumns

Constants = Mapping[str, ColumnOrFloat]
"""Name -> value, one for all runs or one for each run."""
_PAIRS_OF_8 = 8.0 * 7.0


class LayerPassSeconds(NamedTuple):
    """Seconds of one pass of one layer over one micro-batch, by activity."""

    products: Column
    attention: Column
    traffic: Column
    slices: Column

    @property
    def kernels(self) -> Column:
        """Seconds of kernels, without tensor-parallel collectives."""
        return self.products + self.attention + self.traffic

    def plus(self, other: "LayerPassSeconds") -> "LayerPassSeconds":
        """The sum of two passes."""
        return LayerPassSeconds(*(mine + its for mine, its in zip(self, other, strict=True)))


def step_terms(runs: RunColumns, given: Constants) -> dict[str, Column]:
    """Seconds of a step by term; their sum is the step time.

    Args:
        runs: as columns.
        given: the constants of `priors.toml`, law `gpu`.
    """
    k = {name: np.asarray(value, dtype=float) for name, value in given.items()}
    law = _Law(runs, k)
    forward = law.forward()
    back = law.backward().plus(law.again())
    launches = k["launch"] * (k["launch_back"] + runs.recompute_share)
    per_layer = law.longest(forward, k["launch"], 1.0) + law.longest(back, launches, 2.0)
    kernels = forward.plus(back)._asdict()
    head, hop = law.head(), np.where(runs.pipeline > 1, law.hop(), 0.0)
    full, last = stage_layers(runs)
    last_bound = last * per_layer + head >= full * per_layer
    layers = np.where(last_bound, last, full)
    slot = layers * per_layer + np.where(last_bound, head, 0.0)
    fill = (runs.pipeline - 1.0) / runs.virtual_stages * full * per_layer + last * per_layer + head
    busy = runs.accumulation * layers
    terms = {name: busy * seconds for name, seconds in kernels.items()}
    terms["waiting"] = busy * (per_layer - sum(kernels.values()))
    terms["head"] = runs.accumulation * np.where(last_bound, head, 0.0)
    terms["pipeline"] = (
        fill - slot + pipeline_slots(runs.accumulation, runs.pipeline, runs.virtual_stages) * hop
    )
    terms["replicas"] = law.replicas(full)
    terms["update"] = law.update(full) + k["fixed"]
    step: Column = sum(terms.values(), np.zeros_like(busy))
    hosts = np.maximum(runs.devices / runs.per_host, 1.0)
    terms["stragglers"] = step * k["stragglers"] * np.log(hosts)
    slower = 1.0 + k["earlier"] * runs.old_software
    return {name: seconds * slower for name, seconds in terms.items()}


def stage_layers(runs: RunColumns) -> tuple[Column, Column]:
    """Layers of a full stage, and of the last stage, which also has the head.

    Stages are filled from the first on. If embedding and head count as one layer each, the last
    stage has one block less than its share.
    """
    full = np.ceil((runs.layers + 2.0 * runs.balanced_embedding) / runs.pipeline)
    last = np.maximum(runs.layers + runs.balanced_embedding - full * (runs.pipeline - 1.0), 0.0)
    return full, np.where(runs.pipeline > 1, last, runs.layers)


class _Law:
    def __init__(self, runs: RunColumns, k: dict[str, Column]) -> None:
        self.runs, self.k = runs, k
        self.tokens = runs.micro * runs.sequence / runs.context * k["filled"]
        faster = np.maximum(runs.peak8 / runs.peak - 1.0, 0.0) * (runs.float8 > 0)
        self.speed = runs.peak * k["products"] * (1.0 + faster * k["float8"])
        self.plain = runs.peak * k["products"]
        self.memory = runs.memory_rate

    def product(
        self,
        rows: ColumnOrFloat,
        columns: ColumnOrFloat,
        depth: ColumnOrFloat,
        *,
        batch: ColumnOrFloat = 1.0,
        rate: Column | None = None,
    ) -> Column:
        return product_seconds(
            rows, columns, depth, batch=batch,
            flop_rate=self.speed if rate is None else rate,
            processors=self.runs.processors, ramp=self.k["ramp"],
            whole_waves=np.minimum(self.k["whole_waves"], 1.0),
        )  # fmt: skip

    def linears(self) -> list[tuple[Column, Column]]:
        """(columns, depth) of a block's products on one slice."""
        r, t = self.runs, self.runs.tensor
        attended = (1.0 + 2.0 * r.kv_head_share) * r.width / t
        widened = np.where(r.ffn_matrices > 2, 2.0, 1.0) * r.ffn_width / t
        return [
            (attended, r.width), (r.width, r.width / t),
            (widened, r.width), (r.width, r.ffn_width / t),
        ]  # fmt: skip

    def factors(self) -> tuple[ColumnOrFloat, Column]:
        """Numbers a token that a block's products take in: whole on each slice, and cut over them.

        The first product of attention and of the feed-forward part takes the whole width.
        """
        r = self.runs
        return 2.0 * r.width, r.width + r.ffn_width

    def gradients(self) -> tuple[ColumnOrFloat, Column]:
        """The same for the gradients of the products' outputs."""
        r = self.runs
        widened = np.where(r.ffn_matrices > 2, 2.0, 1.0) * r.ffn_width
        return 2.0 * r.width, (1.0 + 2.0 * r.kv_head_share) * r.width + widened

    def products(self) -> Column:
        """Seconds of the products of a layer's forward pass."""
        return sum(
            (self.product(self.tokens, wide, deep) for wide, deep in self.linears()),
            np.zeros_like(self.tokens),
        )

    def forward(self) -> LayerPassSeconds:
        traffic = self._traffic() + self._casts(*self.factors())
        products = self.products() * self._misfit()
        return LayerPassSeconds(products, self._attention(), traffic, self._slices())

    def backward(self) -> LayerPassSeconds:
        products = sum(
            (
                self.product(self.tokens, deep, wide) + self.product(deep, wide, self.tokens)
                for wide, deep in self.linears()
            ),
            np.zeros_like(self.tokens),
        )
        attention = self._attention() * self.k["attention_back"]
        factors, gradients = self.factors(), self.gradients()
        casts = self._casts(factors[0] + gradients[0], factors[1] + gradients[1])
        traffic = self._traffic() * self.k["traffic_back"] + casts
        return LayerPassSeconds(products * self._misfit(), attention, traffic, self._slices())

    def again(self) -> LayerPassSeconds:
        """What recompute does: a layer's forward pass, or what is not kept of it.

        Torch's checkpoints stop at the last number that the backward pass needs (`early_stop`), so
        that a layer's last product is not made again, nor its sum scattered. Of a run that keeps
        every second product, attention and scattered sums are kept too, and all else is made again.
        Sources: torch.utils.checkpoint, `set_checkpoint_early_stop`; torchtitan,
        `activation_checkpoint.py`.
        """
        r, stop = self.runs, self.k["early_stop"]
        whole, some = (r.recompute_share == 1).astype(float), (r.recompute_share > 0).astype(float)
        made, last = self.products(), self.product(self.tokens, *self.linears()[-1])
        made = np.where(r.recompute_share == 1, made - stop * last, made * r.recompute_share)
        attention = self._attention() * (whole + r.selective_recompute * self.k["selective"])
        traffic = self._traffic() + self._casts(*self.factors())
        slices = self._slices(gathers=2.0 * some, scatters=(2.0 - stop) * whole, around=whole)
        return LayerPassSeconds(made * self._misfit(), attention, traffic * some, slices)

    def _misfit(self) -> Column:
        """Products whose sizes are no multiples of 64 on a slice miss the fast kernels.

        Source: NVIDIA, Matrix Multiplication Background User's Guide, "tensor core requirements".
        """
        part = self.runs.width / self.runs.tensor
        return np.asarray(1.0 + self.k["odd_width"] * (np.mod(part, 64) > 0), dtype=float)

    def _attention(self) -> Column:
        r = self.runs
        head = r.width / r.heads
        products = r.micro * r.heads / r.tensor
        mine = r.sequence / r.context * self.k["filled"]
        keys = r.sequence * self.k["filled"]
        flop = 4.0 * products * mine * keys * head * self.k["scored"]
        seconds = flop / (self.plain * self.k["attention"]) * (1 + self.k["ramp"] / head)
        # Tensor cores take 16-bit rows of multiples of 8 numbers (16 bytes).
        odd = 1.0 + self.k["odd_head"] * (np.mod(head, 8) > 0)
        parted = 1.0 + self.k["parted"] * (1.0 - 1.0 / r.context)
        return np.asarray(seconds * odd * parted, dtype=float)

    def _traffic(self) -> Column:
        r, t = self.runs, self.runs.tensor
        whole = self.k["whole_bytes"] * np.where(r.sequence_parallel > 0, 1.0 / t, 1.0)
        numbers = self.tokens * r.width * (whole + self.k["sliced_bytes"] / t)
        scores = r.heads / t * self.tokens * r.sequence * self.k["score_bytes"]
        return np.asarray((numbers + scores) / self.memory, dtype=float)

    def _casts(self, whole: ColumnOrFloat, sliced: Column) -> Column:
        """Seconds in which numbers become 8-bit ones: read for their scales, and read again."""
        r = self.runs
        each = np.where(r.float8 == 2, self.k["cast_rows"], self.k["cast"]) * (r.float8 > 0)
        numbers = self.tokens * (whole + sliced / r.tensor)
        return np.asarray(numbers * each / self.memory, dtype=float)

    def _slices(
        self,
        gathers: ColumnOrFloat = 2.0,
        scatters: ColumnOrFloat = 2.0,
        around: ColumnOrFloat = 1.0,
    ) -> Column:
        """Two all-reduces of a pass of one layer: as many gatherings, and scatterings of a sum.

        Slices with one scale a tensor gather 8-bit numbers. Source: torchao,
        `float8_tensor_parallel.py`.

        Args:
            gathers: how many of them.
            scatters: how many of them.
            around: whether keys and values pass by too (ring attention), 0 or 1.
        """
        r = self.runs
        nbytes = 2.0 * self.tokens * r.width
        each = 0.5 * self.all_reduce(nbytes, r.tensor, np.ones_like(r.tensor))
        latency = 0.5 * self.k["latency"] * np.log2(np.maximum(r.tensor, 1.0))
        sent = gathers * (each * np.where(r.float8 == 1, 0.5, 1.0) + latency)
        sent += scatters * (each + latency)
        # Ring attention: keys and values of every other part pass by.
        passed = ring_bytes(2.0 * nbytes * r.context * r.kv_head_share, r.context)
        passed = passed / r.tensor / self.rate(r.context, r.tensor) * self.k["context_part"]
        shown = 1.0 - r.async_tensor_parallel * self.k["covered"]
        return np.asarray(sent * shown + around * passed, dtype=float)

    def rate(self, ranks: ColumnOrFloat, stride: ColumnOrFloat) -> Column:
        r = self.runs
        return ring_rate(
            ranks, stride, per_host=r.per_host, devices=r.devices,
            inner=r.intra_host_rate * self.k["inner"], cards=r.network_rate * self.k["cards"],
        )  # fmt: skip

    def all_reduce(self, nbytes: Column, ranks: Column, stride: Column) -> Column:
        r = self.runs
        return all_reduce_seconds(
            nbytes, ranks, stride, per_host=r.per_host, devices=r.devices,
            inner=r.intra_host_rate * self.k["inner"], cards=r.network_rate * self.k["cards"],
        )  # fmt: skip

    def longest(self, of: LayerPassSeconds, launches: Column, gathered: float) -> Column:
        """The longest of kernels with what slices exchange, launching, and gathering weights."""
        r = self.runs
        pairs = r.tensor * (r.tensor - 1.0) / _PAIRS_OF_8
        host = launches * (1.0 + self.k["pairs"] * pairs)
        share = np.minimum(self.k["slices_inside"], 1.0)
        inside = smooth_max(of.kernels + share * of.slices, host)
        alone = inside + (1.0 - share) * of.slices
        weights = r.parameters_per_block / r.tensor * 2.0 * (r.zero >= 3)
        rate = self.rate(r.replicas * r.context, r.tensor)
        sent = gathered * ring_bytes(weights, r.replicas * r.context) / rate
        return smooth_max(alone, sent) + self.k["gather_shown"] * sent

    def hop(self) -> Column:
        """Seconds that a micro-batch takes to the next stage and its gradient back."""
        r = self.runs
        nbytes = 2.0 * self.tokens * r.width / r.tensor
        apart = r.tensor * r.context * r.replicas
        inside = apart < r.per_host
        outer = r.network_rate * self.k["cards"] / r.per_host
        rate = np.where(inside, r.intra_host_rate * self.k["inner"], outer)
        return np.asarray(2.0 * r.virtual_stages * (nbytes / rate + self.k["hop"]), dtype=float)

    def head(self) -> Column:
        r = self.runs
        tokens = self.tokens * r.head_position_share
        part = r.vocabulary / r.tensor
        products = self.product(tokens, part, r.width, rate=self.plain)
        products += self.product(tokens, r.width, part, rate=self.plain)
        products += self.product(r.width, part, tokens, rate=self.plain)
        return np.asarray(products + tokens * part * self.k["logit_bytes"] / self.memory)

    def weights(self, layers: Column) -> Column:
        """Parameters of the fullest device before any sharding over replicas."""
        r = self.runs
        return np.asarray(
            (layers * r.parameters_per_block + r.vocabulary_parameters / r.vocabulary_matrices)
            / r.tensor,
            dtype=float,
        )

    def replicas(self, layers: Column) -> Column:
        """Gradients are summed over replicas once a step; what ZeRO-3 scatters is in its passes."""
        r = self.runs
        nbytes = self.weights(layers) * self.k["gradient_bytes"]
        ranks = r.replicas * r.context
        sent = np.where(r.zero >= 3, 0.0, self.all_reduce(nbytes, ranks, r.tensor))
        # Neighbours of different rings share a card, and each ring has several ranks in a host.
        crowded = (r.network_cards < r.per_host) & (r.tensor > 1) & (2.0 * r.tensor <= r.per_host)
        crowded &= ranks * r.tensor > r.per_host
        sent = sent * (1.0 + self.k["crowded"] * crowded)
        return np.asarray(sent * self.k["sum_shown"], dtype=float)

    def update(self, layers: Column) -> Column:
        r = self.runs
        sharers = np.where(r.zero >= 1, r.replicas * r.context, 1.0)
        return np.asarray(
            self.weights(layers) / sharers * self.k["update_bytes"] / self.memory, dtype=float
        )
