"""Chain: a model as the layers at which it may be cut, found in any module that is one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from windlass.errors import ModelError
from windlass.models.init_weights import drawn, put_parameter, state_of
from windlass.models.layer_kinds import kinds_of
from windlass.models.shape_inference import WAY_OUT, logits_width, position_rows
from windlass.models.tensor_parallel.sharding_rules import (
    Cut,
    LayerCuts,
    layer_cuts,
    matches,
    read_cut,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A model as consecutive layers.

    The first layer takes tokens `Int[b s]`, the last gives logits `Float[b s v]`, every other maps
    `Float[b s d]` to `Float[b s d]`. The loss (mean cross-entropy) is not part of the chain.
    """

    name: str
    layers: tuple[nn.Module, ...]
    """On the meta device, or holding real weights."""
    names: tuple[str, ...]
    """One for each layer, unique; a parameter's full name is `<layer name>.<its name inside>`."""
    kinds: tuple[str, ...]
    """One for each layer; layers of one kind have equal structure and shapes."""
    ties: Mapping[str, str]
    """Full name of a parameter -> full name of the earlier one whose memory it shares."""
    vocabulary: int
    max_sequence: int | None
    """Longest sequence the model takes; None if it sets no limit."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """How modules are cut over slices, by pattern of full names, beyond what they know themselves;
    `*` stands for one part between dots."""


def cuts_of(chain: Chain, index: int) -> LayerCuts:
    """How one layer of a chain is cut over slices."""
    return layer_cuts(chain.layers[index], chain.names[index], chain.cuts, first=index == 0)


def chain_of(
    module: nn.Module,
    name: str,
    *,
    vocabulary: int | None = None,
    max_sequence: int | None = None,
    cuts: Mapping[str, str] | None = None,
) -> Chain:
    """The chain that `module` is.

    Nested sequences are flattened. Nothing is computed and no weight is copied.

    Args:
        module: an `nn.Sequential` or `nn.ModuleList`, on any device.
        name: what plans and records will call it.
        vocabulary: width of the logits; None finds it by a trial run without numbers.
        max_sequence: longest sequence; None looks for a table of positions.
        cuts: rules by pattern of full names, as `read_cut` reads them.

    Raises:
        ModelError: it is no chain of layers, or a rule cannot be read or is for nothing in it.
    """
    if not isinstance(module, (nn.Sequential, nn.ModuleList)):
        raise ModelError(
            f"model `{name}` is a `{type(module).__name__}`, whose layers Windlass cannot tell; "
            + WAY_OUT
        )
    named = list(_flatten(module, ""))
    if len(named) < 2:
        raise ModelError(f"model `{name}` has {len(named)} layers, needs at least 2; {WAY_OUT}")
    layers = tuple(layer for _, layer in named)
    kinds = kinds_of(layers)
    if vocabulary is None:
        vocabulary = logits_width(name, named, kinds)
    if max_sequence is None:
        max_sequence = position_rows(layers[0], vocabulary)
    return Chain(
        name=name,
        layers=layers,
        names=tuple(layer_name for layer_name, _ in named),
        kinds=kinds,
        ties=_ties(named),
        vocabulary=vocabulary,
        max_sequence=max_sequence,
        cuts=_rules(name, named, kinds, cuts or {}),
    )


def materialise(chain: Chain, index: int, *, seed: int, device: str) -> nn.Module:
    """One layer of a chain with real weights, drawn from (seed, parameter's name) alone.

    Which layers are built, in what order and on what device does not change the numbers. A
    parameter that is tied to one of an earlier layer holds the owner's numbers in memory of its
    own: whoever holds both layers joins them. Weights that a
    model sets outside of any `reset_parameters` come only from building it whole (`build_chain`).

    Args:
        chain: its layer is on the meta device, and stays as it is, or has real weights, which are
            then handed over: there is no room for a large model twice.
        index: place of the layer in the chain.
        seed: of all weights of the model.
        device: where the layer shall be.

    Raises:
        ModelError: a module of the layer cannot draw its own weights.
    """
    name, layer = chain.names[index], chain.layers[index]
    if not any(tensor.is_meta for tensor in state_of(layer)):
        return layer.to(device)
    real = drawn(layer, name, seed)
    for tied, owner in chain.ties.items():
        if tied.startswith(f"{name}."):
            place = tied.removeprefix(f"{name}.")
            put_parameter(real, place, _owner(chain, real, name, owner, seed))
    return real.to(device)


def _owner(chain: Chain, real: nn.Module, name: str, owner: str, seed: int) -> nn.Parameter:
    """The parameter called `owner`, of this layer or drawn for itself."""
    if owner.startswith(f"{name}."):
        return real.get_parameter(owner.removeprefix(f"{name}."))
    index = next(i for i, other in enumerate(chain.names) if owner.startswith(f"{other}."))
    path = owner.removeprefix(f"{chain.names[index]}.")
    module_path, _, leaf = path.rpartition(".")
    module = chain.layers[index].get_submodule(module_path)
    full = f"{chain.names[index]}.{module_path}" if module_path else chain.names[index]
    return drawn(module, full, seed).get_parameter(leaf)


def _flatten(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Layers with their names; a layer that stands twice is given twice."""
    for name, child in module._modules.items():  # noqa: SLF001  named_children leaves twins out
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from _flatten(child, f"{prefix}{name}.")
        elif child is not None:
            yield f"{prefix}{name}", child


def _rules(
    model: str,
    named: Sequence[tuple[str, nn.Module]],
    kinds: Sequence[str],
    rules: Mapping[str, str],
) -> dict[str, Cut]:
    """The rules, each of which is for something, and all the same for layers of one kind."""
    read = {pattern: read_cut(pattern, text) for pattern, text in rules.items()}
    for pattern, cut in read.items():
        if not any(True for name, layer in named for _ in matches(layer, name, pattern, cut)):
            what = "setting that is a whole number" if cut.way == "count" else "module"
            raise ModelError(
                f"rule `{pattern}` of model `{model}` is for no {what} of it; name one as in its "
                f"parameters' names, such as `{named[-1][0]}`, with `*` for one part between dots"
            )
    firsts: dict[str, tuple[str, Mapping[str, Cut]]] = {}
    for (name, layer), kind in zip(named, kinds, strict=True) if read else ():
        ways = layer_cuts(layer, name, read, first=False).ways
        twin, same = firsts.setdefault(kind, (name, ways))
        if ways != same:
            raise ModelError(
                f"the rules of model `{model}` do not cut `{name}` as they cut `{twin}`, which is "
                "its equal; let `*` stand for what tells their names apart"
            )
    return read


def _ties(named: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    owners: dict[int, str] = {}
    ties: dict[str, str] = {}
    for layer_name, layer in named:
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            full = f"{layer_name}.{name}"
            owner = owners.setdefault(id(parameter), full)
            if owner != full:
                ties[full] = owner
    return ties
