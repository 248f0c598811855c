"""The tensors that live from step to step on one device: weights and optimizer state.

Each weight is stored once, at the layer that owns it; tied layers borrow it. In bfloat16 the
layers compute with copies of float32 masters, made anew at each update.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.models.layer_stack import Chain, materialise
from windlass.schema.graph import Precision
from windlass.schema.plan import Moments, Plan
from windlass.torch_ext.quantized_moments import Kept

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64,
}  # fmt: skip

AWAY = torch.empty(0)
"""In place of weights that are not near."""

SHARD_MARK = "@"
"""In a checkpoint between a weight's name and the element of it that a shard begins at."""

CHUNK = 2**21
"""Elements that are converted at a time. A part of 8 MiB stays in the shared cache: on 2 cores of a
Zen 4 the update of 38.6 M weights in bfloat16 takes 50 ms so, and 110 ms in one piece. Parts of
2 MiB take 40 ms, but at each of their many ends the threads wait for each other, which on a machine
that others use too costs up to 40 times as much."""


@dataclass(slots=True, kw_only=True, eq=False)
class Parameter:
    """One parameter as layers use it: what they compute with, and the gradient of a step."""

    name: str
    """Full name: `<layer name>.<its name inside>`."""
    working: Tensor
    """In the run's precision; empty while it is in another tier, or on other devices."""
    shape: torch.Size
    gradient: Tensor | None = None
    """Summed over the micro-batches of a step; None before the first and after the update."""
    rows: Tensor | None = None
    """Sparse gradients of several micro-batches, summed apart and added at the end, so that the
    whole does not depend on the order in which layers run."""

    def add(self, gradient: Tensor, *, summed: bool) -> None:
        """Adds a micro-batch's gradient.

        Args:
            gradient: handed over; not to be used by the caller afterwards.
            summed: whether several micro-batches come together, which is done in float32.
        """
        if gradient.is_sparse:
            rows = gradient.to(_wide(gradient.dtype)) if summed else gradient
            self.rows = (rows if self.rows is None else self.rows + rows).coalesce()
            if not summed:
                self.complete()
        elif self.gradient is None:
            # The optimizer walks memory, so the layout must be the weight's.
            self._begin(gradient.to(_wide(gradient.dtype) if summed else gradient.dtype))
        elif gradient.dtype == self.gradient.dtype:
            self.gradient.add_(gradient)
        else:
            # In parts: torch makes a float32 copy of whatever is added to float32.
            parts = zip(_parts(self.gradient), _parts(gradient.contiguous()), strict=True)
            for total, part in parts:
                total.add_(part)

    def complete(self) -> None:
        """Adds the rows to the gradient; called before anybody looks at it."""
        rows, self.rows = self.rows, None
        if rows is None:
            return
        if self.gradient is None:
            self._begin(rows.to_dense())
        else:
            self.gradient.add_(rows.to(self.gradient.dtype))

    def _begin(self, gradient: Tensor) -> None:
        """Takes the first that is added, in the precision of the sum."""
        self.gradient = gradient.contiguous()

    def forget(self) -> None:
        """Drops the gradient."""
        self.gradient = self.rows = None


@dataclass(slots=True, kw_only=True, eq=False)
class Weight(Parameter):
    """One parameter whose optimizer state is near: its master and its moments."""

    master: Tensor
    """float32; only the update changes it. The working tensor itself in float32."""
    moment1: Tensor
    moment2: Tensor
    """Float32, bfloat16 or codes, in the weight's shape."""
    steps: Tensor
    """`Float[]`: updates so far, as torch's AdamW counts them."""
    scale1: Tensor | None = None
    scale2: Tensor | None = None
    """Of codes: one for each block."""
    decays: bool
    """Whether it is pulled towards zero: weights of one dimension are not."""
    first: int = 0
    """Where it begins in the whole weight, if it is a shard of one."""

    @property
    def moments(self) -> tuple[Kept, Kept]:
        """Both moments as they are kept."""
        return Kept(self.moment1, self.scale1), Kept(self.moment2, self.scale2)

    def refresh(self) -> None:
        """Makes the working copy from the master, where they are not the same tensor."""
        if self.working is not self.master:
            self.working.detach().copy_(self.master)


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """What one layer computes with."""

    name: str
    owned: tuple[Parameter, ...]
    """Updated and saved here."""
    used: tuple[Parameter, ...]
    """In the order of the template's parameters; owned here or by an earlier layer."""
    buffers: tuple[Tensor, ...]
    """In the order of the template's buffers."""
    saved_buffers: Mapping[str, Tensor]
    """Full name -> the buffers that belong to a checkpoint."""

    @property
    def weights(self) -> list[Tensor]:
        """What the template is called with."""
        return [weight.working for weight in self.used]


@dataclass(frozen=True, kw_only=True)
class LayerTensors(LayerParameters):
    """What one layer holds where all of it is near."""

    owned: tuple[Weight, ...]

    def saved(self, *, moments: bool = True) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds of this layer, under its name there.

        Args:
            moments: also what only the optimizer needs.
        """
        yield from saved_tensors(self.owned, self.saved_buffers, moments=moments)


def saved_tensors(
    weights: Iterable[Weight],
    buffers: Mapping[str, Tensor],
    *,
    moments: bool = True,
    whole: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of some weights, under their names there.

    Args:
        weights: of one layer.
        buffers: of the layer, by full name.
        moments: also what only the optimizer needs.
        whole: whether they are whole weights; the name of a shard says where it begins.
    """
    named = [(w.name if whole else f"{w.name}{SHARD_MARK}{w.first}", w) for w in weights]
    for name, weight in named:
        yield f"weight/{name}", weight.master
    for name, weight in named if moments else ():
        for which, kept in enumerate(weight.moments, start=1):
            yield f"moment{which}/{name}", kept.values
            if kept.scales is not None:
                yield f"scale{which}/{name}", kept.scales
        yield f"steps/{name}", weight.steps
    for name, buffer in buffers.items():
        yield f"buffer/{name}", buffer


def layer_tensors(
    chain: Chain,
    *,
    seed: int,
    precision: Precision,
    device: torch.device,
    moments: Moments = "float32",
) -> tuple[LayerTensors, ...]:
    """The tensors of a whole chain, materialised layer by layer.

    Args:
        chain: the model; a layer on the meta device gets weights keyed by `seed` and their names.
        seed: of the initial weights.
        precision: what layers compute in.
        device: where everything lies.
        moments: how the optimizer's are kept.
    """
    weights: dict[str, Weight] = {}
    layers = []
    for index, name in enumerate(chain.names):
        layer = materialise(chain, index, seed=seed, device=str(device))
        names = [f"{name}.{inner}" for inner, _ in layer.named_parameters()]
        owned = []
        for full, parameter in zip(names, layer.parameters(), strict=True):
            if full not in chain.ties:
                weights[full] = _weight(full, parameter, precision, moments)
                owned.append(weights[full])
        layers.append(
            LayerTensors(
                name=name,
                owned=tuple(owned),
                used=tuple(weights[chain.ties.get(full, full)] for full in names),
                buffers=tuple(layer.buffers()),
                saved_buffers=saved_buffers(name, layer),
            )
        )
    return tuple(layers)


def sum_dtype(plan: Plan) -> torch.dtype:
    """What gradients of a step's micro-batches are summed in."""
    working = DTYPES[plan.precision]
    return _wide(working) if plan.batch.accumulation > 1 else working


def master_dtype(precision: Precision) -> torch.dtype:
    """What masters, sums of gradients and plain moments are kept in."""
    return _wide(DTYPES[precision])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _weight(name: str, parameter: nn.Parameter, precision: Precision, moments: Moments) -> Weight:
    master = parameter.detach().to(master_dtype(precision)).contiguous()
    if master.dtype == DTYPES[precision]:
        working = master.requires_grad_()
    else:
        working = master.to(DTYPES[precision]).requires_grad_()
    return weight_of(name, master, working, moments, decays=master.dim() >= 2)


def weight_of(
    name: str,
    master: Tensor,
    working: Tensor,
    moments: Moments,
    *,
    decays: bool,
    first: int = 0,
) -> Weight:
    """A weight, or a shard of one, that had no update yet.

    Args:
        name: of the whole weight.
        master: changed by updates.
        working: what layers compute with; may be the same tensor.
        moments: how they are kept.
        decays: whether it is pulled towards zero.
        first: element of the whole weight that a shard begins at.
    """
    shape, device = tuple(master.shape), master.device
    one, two = (Kept.zeros(moments, which, shape, device) for which in (0, 1))
    if master.dtype == torch.float64:
        one, two = (Kept(kept.values.double()) for kept in (one, two))
    return Weight(
        name=name,
        shape=master.shape,
        master=master,
        working=working,
        moment1=one.values,
        moment2=two.values,
        scale1=one.scales,
        scale2=two.scales,
        steps=torch.zeros((), device=master.device),
        decays=decays,
        first=first,
    )


def saved_buffers(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """Full name -> each buffer of a layer that belongs to a checkpoint."""
    kept = layer.state_dict().keys()
    return {f"{name}.{inner}": b for inner, b in layer.named_buffers() if inner in kept}


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.detach().view(-1).split(CHUNK)
