"""A model as a stack of layers, the units that pipeline stages and phases are made of."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from windlass.errors import ModelError
from windlass.models.huggingface.weight_places import WeightPlace
from windlass.models.init_weights import (
    init_from_seed,
    parameters_and_buffers,
    set_parameter,
)
from windlass.models.inspection.layer_kinds import find_layer_kinds, split_kinds
from windlass.models.inspection.shape_inference import (
    LAYER_STACK_HINT,
    infer_layer_shapes,
    infer_max_sequence,
    try_sequences,
)
from windlass.models.loss import mean_squared_error, set_layer_loss
from windlass.models.sparsity.imported_masks import put_masks
from windlass.models.tensor_parallel.sharding_rules import (
    LayerSharding,
    ShardingRule,
    matching_paths,
    parse_sharding_rule,
    resolve_sharding,
)
from windlass.models.tracing.cut_module import EndLayer, cut_module
from windlass.models.tracing.model_call import ModelCall
from windlass.schema import ExampleShape

_TRIED_TOKENS = 8
_TOLERANCE = 1e-4
"""Difference that shows a later token, as a share of the largest output; rounding leaves less."""


class WeightSource(Protocol):
    """Where the weights of a stack come from in place of a seed."""

    @property
    def parameters(self) -> frozenset[str]:
        """Full names of the parameters and buffers that it has; others are drawn."""

    def read(self, parameter: str) -> Tensor:
        """The values of a tensor by its full name, in the type that they are stored in."""

    def dtype(self, parameter: str) -> torch.dtype:
        """The type that `read` gives."""

    def place(self, parameter: str) -> WeightPlace | None:
        """The bytes of files that are what `read` gives; None if nothing stands there as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """A model as consecutive layers.

    The first layer takes tokens `Int[b s]` and the last gives logits `Float[b s v]`; or, if
    `examples` says so, they take arrays such as images `Float[b c h w]` and give `Float[b v]`. What
    passes between layers is one tensor `Float[b ...]`, whose shape may change from layer to layer.
    The loss is not a layer of the stack.
    """

    name: str
    layers: tuple[nn.Module, ...]
    """Modules on the meta device, or with real weights."""
    names: tuple[str, ...]
    """Unique name of each layer; a parameter's full name is `<layer name>.<its name inside>`."""
    kinds: tuple[str, ...]
    """Kind of each layer; layers of one kind have equal structure and shapes."""
    tied_weights: Mapping[str, str]
    """Full name of each tied parameter -> full name of the earlier one whose memory it shares."""
    vocabulary: int
    """Entries of the vocabulary, classes, or numbers that are predicted."""
    max_sequence: int | None
    """Longest sequence the model accepts; None if it sets no limit."""
    examples: ExampleShape | None = None
    """What it takes if it takes no tokens."""
    sharding_rules: Mapping[str, ShardingRule] = field(default_factory=dict)
    """Tensor-parallel rules by pattern of full module names, in addition to those that modules
    define themselves; `*` matches one name between dots."""
    unshardable: str | None = None
    """Why the model's own plan of its shards is not taken; None if it has none, or it is."""
    mask_file: Path | None = None
    """File with the masks of sparse layers; None draws them with the weights."""
    weights: WeightSource | None = None
    """Where trained weights are read from; None draws them from the seed."""
    draw: Callable[[nn.Module], None] | None = None
    """Draws the weights of one module; None calls its `reset_parameters`."""
    graph_layers: frozenset[str] = frozenset()
    """Names of layers cut out of a module that has none of such a name."""

    def name_in_module(self, parameter: str) -> str:
        """The name that a parameter or buffer has in the module, by its full name in the stack."""
        layer, _, path = parameter.partition(".")
        return path if layer in self.graph_layers else parameter

    def layer_of(self, parameter: str) -> int:
        """The index of the layer that has a parameter, by its full name in the stack."""
        return next(i for i, name in enumerate(self.names) if parameter.startswith(f"{name}."))


def layer_sharding(stack: LayerStack, index: int) -> LayerSharding:
    """The tensor-parallel rules of one layer of a stack."""
    return resolve_sharding(
        stack.layers[index],
        stack.names[index],
        stack.sharding_rules,
        is_first=index == 0,
        positions=None if stack.examples is None else stack.examples.positions,
    )


def layer_stack_from_module(
    module: nn.Module,
    name: str,
    *,
    vocabulary: int | None = None,
    max_sequence: int | None = None,
    input_shape: tuple[int, ...] | None = None,
    predicts: str | None = None,
    sharding_rules: Mapping[str, str] | None = None,
    call: ModelCall | None = None,
) -> LayerStack:
    """Reads a module as a stack of layers.

    Nested sequences are flattened, and no weight is copied. Any other module is taken apart by
    running it; its layers share its weights and, if those are real, are proved equal to it.

    Args:
        module: an `nn.Sequential`, an `nn.ModuleList` or a module with a list of blocks, on any
            device.
        vocabulary: width of the logits; None infers it by running the layers on fake tensors.
        max_sequence: longest sequence; None looks for a table of positions.
        input_shape: shape of one input of a model that takes no tokens; None takes tokens.
        predicts: what it predicts of such an input: `class`, `numbers`, or None for a class.
        sharding_rules: rules by pattern of full names, in the syntax of `parse_sharding_rule`.
        call: how a module that is no sequence is called; None finds that in its forward pass.

    Raises:
        ModelError: the module cannot be read as a sequence of layers, or a rule cannot be parsed
            or matches nothing in it.
    """
    is_chain = isinstance(module, (nn.Sequential, nn.ModuleList))
    if is_chain:
        named = list(named_layers(module))
    else:
        named = list(cut_module(module, name, call=call, examples=input_shape))
    if len(named) < 2:
        raise ModelError(
            f"model `{name}` has {len(named)} layers, needs at least 2; {LAYER_STACK_HINT}"
        )
    layers = tuple(layer for _, layer in named)
    kinds = find_layer_kinds(layers)
    examples = None
    if vocabulary is None or input_shape is not None:
        shapes = infer_layer_shapes(name, named, kinds, input_shape)
        kinds, vocabulary = split_kinds(kinds, shapes.inputs), shapes.output[-1]
        if input_shape is not None:
            numbers = vocabulary if predicts == "numbers" else None
            examples = ExampleShape(inputs=input_shape, numbers=numbers, positions=shapes.positions)
            if numbers is not None:
                set_layer_loss(layers[-1], mean_squared_error)
    if max_sequence is None and examples is None:
        max_sequence = infer_max_sequence(layers[0], vocabulary)
        if max_sequence is None and not is_chain:
            max_sequence = try_sequences(layers[0])
    return LayerStack(
        name=name,
        layers=layers,
        names=tuple(layer_name for layer_name, _ in named),
        kinds=kinds,
        tied_weights=_tied_weights(named),
        vocabulary=vocabulary,
        max_sequence=max_sequence,
        examples=examples,
        sharding_rules=_parse_rules(name, named, kinds, sharding_rules or {}),
        graph_layers=frozenset(
            layer_name for layer_name, layer in named if isinstance(layer, EndLayer)
        )
        if not is_chain
        else frozenset(),
    )


def layer_that_looks_ahead(stack: LayerStack) -> str | None:
    """The first layer whose output for a token depends on a later token, such as "`1`, a `Block`".

    Layers of one kind are alike, so the first of each is tried.

    Args:
        stack: a model with real weights. Those that are zero become random, because a branch that
            begins at zero would hide what it sees.

    Returns:
        None if no layer does, or one cannot be tried alone.
    """
    length = min(_TRIED_TOKENS, stack.max_sequence or _TRIED_TOKENS)
    outputs: dict[str, Tensor] = {}
    x = torch.zeros((2, length), dtype=torch.int64)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for name, kind, layer in zip(stack.names, stack.kinds, stack.layers, strict=True):
            if kind not in outputs:
                try:
                    outputs[kind], sees_ahead = _try_layer(layer.eval(), x)
                except Exception:  # noqa: BLE001  the user's code may raise anything
                    return None
                if sees_ahead:
                    return f"`{name}`, a `{type(layer).__name__}`"
            x = outputs[kind]
    return None


def materialize_layer(
    stack: LayerStack,
    index: int,
    *,
    seed: int,
    device: str,
    tied: bool = True,
    empty: Collection[str] = (),
) -> nn.Module:
    """One layer of a stack with real weights, each read or drawn from (seed, its name) alone.

    Which layers are built, in what order and on what device does not change the weights. A
    parameter that is tied to one of an earlier layer gets the owner's values in memory of its own;
    a caller that holds both layers ties them again. Weights that a model sets outside of any
    `reset_parameters` are only right if the whole model is built (`build_layer_stack`).

    Args:
        stack: its layer is on the meta device, and is not changed, or it has real weights and is
            returned itself, because a large model may not fit into memory twice.
        tied: whether parameters that are tied to an earlier layer get the owner's values; if not,
            they are empty, for a caller that takes those of the owner.
        empty: names inside the layer of parameters that are not needed; those of a layer without
            real weights become empty.

    Raises:
        ModelError: a module of the layer cannot draw its own weights.
    """
    name, layer = stack.names[index], stack.layers[index]
    if not any(tensor.is_meta for tensor in parameters_and_buffers(layer)):
        return layer.to(device)
    owners = {
        full_name.removeprefix(f"{name}."): owner
        for full_name, owner in stack.tied_weights.items()
        if full_name.startswith(f"{name}.")
    }
    real = _real_layer(stack, layer, name, seed, empty={*owners, *empty})
    if stack.mask_file is not None:
        put_masks(real, name, stack.mask_file, seed=seed)
    for path, owner in owners.items():
        if tied or owner.startswith(f"{name}."):
            set_parameter(real, path, _owner_parameter(stack, real, name, owner, seed))
    return real.to(device)


def _owner_parameter(
    stack: LayerStack, real: nn.Module, name: str, owner: str, seed: int
) -> nn.Parameter:
    """The parameter called `owner`: of the layer `real`, or drawn anew from its own layer."""
    if owner.startswith(f"{name}."):
        return real.get_parameter(owner.removeprefix(f"{name}."))
    index = stack.layer_of(owner)
    path = owner.removeprefix(f"{stack.names[index]}.")
    module_path, _, leaf = path.rpartition(".")
    module = stack.layers[index].get_submodule(module_path)
    full_name = f"{stack.names[index]}.{module_path}" if module_path else stack.names[index]
    return _real_layer(stack, module, full_name, seed).get_parameter(leaf)


def _real_layer(
    stack: LayerStack, layer: nn.Module, name: str, seed: int, *, empty: Collection[str] = ()
) -> nn.Module:
    """A copy of a layer, or of a module in one, with the weights that its stack says.

    Args:
        layer: on the meta device, and not changed.
        empty: names of parameters that become empty tensors.
    """
    if stack.weights is None:
        return init_from_seed(layer, name, seed, empty=empty, draw=stack.draw)
    parameters = {
        path: parameter
        for path, parameter in layer.named_parameters(remove_duplicate=False)
        if f"{name}.{path}" in stack.weights.parameters
    }
    real = init_from_seed(layer, name, seed, empty={*parameters, *empty}, draw=stack.draw)
    for path, parameter in parameters.items():
        if path not in empty:
            values = stack.weights.read(f"{name}.{path}").to(parameter.dtype)
            set_parameter(real, path, nn.Parameter(values, parameter.requires_grad))
    for path, buffer in real.named_buffers():
        if f"{name}.{path}" in stack.weights.parameters:
            buffer.copy_(stack.weights.read(f"{name}.{path}"))
    return real


def _try_layer(layer: nn.Module, x: Tensor) -> tuple[Tensor, bool]:
    """The output for `x[b s ...]`, and whether another last token changes that of earlier ones."""
    for parameter in layer.parameters():
        if parameter.is_floating_point() and not parameter.any():
            parameter.normal_(std=0.1)
    changed = x.clone()
    if x.is_floating_point():
        changed[:, -1] += torch.randn_like(x[:, -1])
    else:
        changed[:, -1] += 1
    output = layer(x)
    difference = (output - layer(changed))[:, :-1].abs().max()
    return output, bool(difference > _TOLERANCE * output.abs().max())


def named_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested sequences with their names; one that occurs twice is given twice."""
    for name, child in module._modules.items():  # noqa: SLF001  named_children skips duplicates
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from named_layers(child, f"{prefix}{name}.")
        elif child is not None:
            yield f"{prefix}{name}", child


def _parse_rules(
    model: str,
    named: Sequence[tuple[str, nn.Module]],
    kinds: Sequence[str],
    texts: Mapping[str, str],
) -> dict[str, ShardingRule]:
    """Parses rules, and checks that each matches something and that equal layers match alike."""
    rules = {pattern: parse_sharding_rule(pattern, text) for pattern, text in texts.items()}
    for pattern, rule in rules.items():
        if not any(
            True for name, layer in named for _ in matching_paths(layer, name, pattern, rule)
        ):
            what = "integer setting" if rule.style == "count" else "module"
            raise ModelError(
                f"rule `{pattern}` of model `{model}` matches no {what}; write the name as in "
                f"parameter names, such as `{named[-1][0]}`, with `*` for one name between dots"
            )
    first_of_kind: dict[str, tuple[str, Mapping[str, ShardingRule]]] = {}
    for (name, layer), kind in zip(named, kinds, strict=True) if rules else ():
        layer_rules = resolve_sharding(layer, name, rules, is_first=False).rules
        twin, twin_rules = first_of_kind.setdefault(kind, (name, layer_rules))
        if layer_rules != twin_rules:
            raise ModelError(
                f"the rules of model `{model}` do not shard `{name}` as they shard `{twin}`, a "
                "layer of the same kind; use `*` for the part in which their names differ"
            )
    return rules


def _tied_weights(named: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    owners: dict[int, str] = {}
    tied: dict[str, str] = {}
    for layer_name, layer in named:
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            full_name = f"{layer_name}.{name}"
            owner = owners.setdefault(id(parameter), full_name)
            if owner != full_name:
                tied[full_name] = owner
    return tied
