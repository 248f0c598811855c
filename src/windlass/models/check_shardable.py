"""Checks whether a layer stack can be sharded over tensor-parallel ranks, and says why not."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from windlass.models.experts.expert_linear import ExpertLinear
from windlass.models.fine_tuning.lora import LINEARS, Adapted, LoraLinear
from windlass.models.images.vit import ClassHead
from windlass.models.inspection.shape_inference import fake_state
from windlass.models.layer_stack import LayerStack, layer_sharding
from windlass.models.loss import has_own_loss
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.norms import ZeroCenteredRMSNorm
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import (
    ParamShard,
    inner_shard,
    param_shards,
    sharded_norm_paths,
)
from windlass.models.tensor_parallel.sharding_rules import (
    REGION_STYLES,
    LayerSharding,
    ShardingRule,
)
from windlass.models.tensor_parallel.sparse_shards import is_sparse, sparse_shard_error

_TOKENWISE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)
"""Modules of torch that compute each token's vector from that vector only."""
_NORM_FORWARDS = (nn.LayerNorm.forward, nn.RMSNorm.forward, ZeroCenteredRMSNorm.forward)
_FEATURE_STYLES = ("column", "row", "linear", "scores")
"""Rules of modules that take or give the features between layers, which a grid shards."""
_RULES_HINT = (
    "name its regions, columns and rows in `model.sharding_rules`, or make it `tokenwise` if it "
    "treats each token by itself"
)


def sharding_errors(stack: LayerStack, degree: int, *, columns: int = 1) -> tuple[str, ...]:
    """Every reason why a stack cannot be sharded over `degree` ranks; empty if it can be.

    Rules that a user wrote are also tried on fake tensors. Whether the sharded layers compute what
    the full layers compute only a comparison of their outputs can tell.
    """
    if degree == 1:
        return ()
    if stack.examples is not None and not isinstance(stack.layers[-1], ClassHead):
        error = (
            f"model `{stack.name}` takes {stack.examples.noun}, and tensor parallelism cuts models "
            "of tokens and vision transformers (`vit-b16`) alone; set `parallel.tensor=1`"
        )
        return (error,)
    if has_own_loss(stack.layers[-1]):
        return (f"model `{stack.name}` has a loss of its own, which is not sharded",)
    tp_rank = TensorParallelRank(degree=degree, columns=columns)
    first_of_kind = {kind: index for index, kind in reversed(list(enumerate(stack.kinds)))}
    indices = sorted(first_of_kind.values())
    errors = [
        f"layer `{stack.names[index]}` of model `{stack.name}`: {error}"
        for index in indices
        for error in _layer_errors(stack, index, tp_rank)
    ]
    errors = errors or list(_tied_weight_errors(stack, tp_rank))
    if not errors and stack.sharding_rules:
        errors = list(_run_errors(stack, indices, tp_rank))
    return tuple(errors)


def _layer_errors(stack: LayerStack, index: int, tp_rank: TensorParallelRank) -> list[str]:
    layer, sharding = stack.layers[index], layer_sharding(stack, index)
    if tp_rank.columns > 1 and any(isinstance(each, Adapted) for each in layer.modules()):
        return ["adapters are not cut over a grid of ranks; set `parallel.tensor` to one number"]
    if not sharding.rules and not sharding.is_first and not isinstance(layer, _TOKENWISE):
        why = f", because {stack.unshardable}" if stack.unshardable else ""
        return [f"no rule says how a `{type(layer).__name__}` is sharded{why}; {_RULES_HINT}"]
    last = index == len(stack.layers) - 1
    errors: list[str] = []
    for path, rule in sharding.rules.items():
        if rule.style != "count":
            degree = inner_shard(layer, sharding, path, tp_rank).total
            name = path or type(layer).__name__
            errors += [
                f"`{name}` {error}"
                for error in _rule_errors(layer, sharding, path, rule, degree, last=last)
            ]
    errors += _dropout_errors(layer, sharding)
    if tp_rank.columns > 1 and not sharding.is_first:
        modules = layer.named_modules()
        sparse = next((path for path, module in modules if is_sparse(module)), None)
        if sparse is None:
            errors += _feature_errors(layer, sharding, tp_rank)
        else:
            errors.append(
                f"`{sparse}` is sparse, which a grid of ranks does not cut; set `parallel.tensor` "
                "to one number"
            )
    # Counts follow from what is sharded, whose errors say it better.
    return errors or list(_count_errors(layer, sharding, tp_rank))


def _feature_errors(
    layer: nn.Module, sharding: LayerSharding, tp_rank: TensorParallelRank
) -> Iterator[str]:
    """Errors of modules that need all features of a token, which a grid shards."""
    norms = frozenset(sharded_norm_paths(layer, sharding))
    columns = tp_rank.columns
    for path, module in layer.named_modules():
        name, rule = f"`{path or type(module).__name__}`", sharding.rules.get(path)
        if path in norms and type(module).forward not in _NORM_FORWARDS:
            yield f"{name} is a norm with its own `forward`; a grid can only shard torch's norms"
        elif path in norms or (rule is not None and rule.style in _FEATURE_STYLES):
            uneven = (width for width in _outer_widths(module, rule) if width % columns)
            if width := next(uneven, None):
                yield (
                    f"{name} has {width} features, which {columns} columns cannot share equally; "
                    "use a number of columns that divides them"
                )
        elif (rule is None or rule.style != "vocabulary") and _has_full_weights(
            module, sharding, path
        ):
            yield (
                f"{name} has weights for all features of a token, which a grid spreads over "
                f"{columns} ranks; name it a column, row or vocabulary, or shard in one dimension"
            )


def _outer_widths(module: nn.Module, rule: ShardingRule | None) -> tuple[int, ...]:
    """Numbers of features between layers that a norm, column, row or `linear` takes or gives."""
    if isinstance(module, LINEARS) and rule is not None:
        names = {"row": ("out_features",), "linear": ("in_features", "out_features")}
        ends = names.get(rule.style, ("in_features",))
        return tuple(getattr(module, name) for name in ends)
    shape: tuple[int, ...] = getattr(module, "normalized_shape", (1,))
    return shape[:1]


def _has_full_weights(module: nn.Module, sharding: LayerSharding, path: str) -> bool:
    """Whether a module has parameters of its own and is no norm inside a region."""
    has_parameters = any(True for _ in module.parameters(recurse=False))
    is_norm = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    return has_parameters and not (sharding.enclosing_region(path) is not None and is_norm)


def _rule_errors(
    layer: nn.Module,
    sharding: LayerSharding,
    path: str,
    rule: ShardingRule,
    degree: int,
    *,
    last: bool,
) -> Iterator[str]:
    module = layer.get_submodule(path)
    if rule.style in REGION_STYLES:
        yield from _region_errors(sharding, path, rule)
    elif rule.style in ("column", "row", "experts"):
        yield from _column_or_row_errors(sharding, path, module, rule, degree)
    elif rule.style == "linear":
        yield from _linear_errors(sharding, path, module, last=last)
    elif rule.style == "scores":
        if not isinstance(module, LINEARS) or sharding.enclosing_region(path) is None:
            yield "is not a linear in a region; only those can be `scores`"
    elif rule.style == "vocabulary":
        yield from _vocabulary_errors(module, rule, degree, first=sharding.is_first, last=last)
    elif rule.style in ("sharded", "replicated"):
        if not isinstance(module, nn.Dropout) or sharding.enclosing_region(path) is None:
            yield f"is not a dropout in a region; only those can be `{rule.style}`"
    elif path:
        yield "is not a layer, and only layers can be `tokenwise`"


def _expert_errors(module: nn.Module, rule: ShardingRule, degree: int) -> Iterator[str]:
    for leaf, dim, parts in rule.weights:
        total = getattr(module, leaf).shape[dim]
        if error := ShardingRule(style="column", parts=parts).divisibility_error(total, degree):
            yield f"has {error}"


def _region_errors(sharding: LayerSharding, path: str, region: ShardingRule) -> Iterator[str]:
    inside = {
        rule.style
        for inner, rule in sharding.rules.items()
        if sharding.enclosing_region(inner) == path
    }
    nested = any(
        inner != path
        and LayerSharding(rules={inner: rule}, is_first=False).enclosing_region(path) is not None
        for inner, rule in sharding.rules.items()
    )
    if sharding.is_first:
        yield "is a region of the first layer, whose ranks have all tokens; shard only its rows"
    if nested:
        yield "is a region inside a region; name only one of them"
    elif region.style == "region" and (missing := {"column", "row"} - inside):
        yield f"is a region without any {' or '.join(sorted(missing))}; name them, or no region"


def _column_or_row_errors(
    sharding: LayerSharding, path: str, module: nn.Module, rule: ShardingRule, degree: int
) -> Iterator[str]:
    if rule.weights:
        yield from _expert_errors(module, rule, degree)
        return
    if not is_sparse(module) and not _is_plain_linear(module):
        yield f"is a `{type(module).__name__}`; only an `nn.Linear` can be a {rule.style}"
        return
    if sharding.enclosing_region(path) is None:
        yield f"is a {rule.style} outside of any region; name the module around it a `region`"
    total: int = getattr(module, "out_features" if rule.style == "column" else "in_features")
    if error := rule.divisibility_error(total, degree):
        yield f"has {error}"
    elif error := sparse_shard_error(module, rule, degree):
        yield error


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether a module computes torch's linear product, or experts', perhaps with an adapter."""
    if isinstance(module, ExpertLinear):
        return True
    plain = (nn.Linear.forward, LoraLinear.forward)
    return isinstance(module, nn.Linear) and type(module).forward in plain


def _linear_errors(
    sharding: LayerSharding, path: str, module: nn.Module, *, last: bool
) -> Iterator[str]:
    if not _is_plain_linear(module):
        yield f"is a `{type(module).__name__}`; only an `nn.Linear` can be a linear"
    elif sharding.is_first or sharding.enclosing_region(path) is not None:
        yield (
            "is a linear in a region or in the first layer; name it a column or a row, or remove "
            "the rule"
        )
    elif last and not path:
        yield "is a linear that gives logits; name it a vocabulary"


def _vocabulary_errors(
    module: nn.Module, rule: ShardingRule, degree: int, *, first: bool, last: bool
) -> Iterator[str]:
    has_torch_forward = type(module).forward == nn.Embedding.forward or _is_plain_linear(module)
    in_place = first if isinstance(module, nn.Embedding) else last
    if not isinstance(module, (nn.Embedding, nn.Linear)) or not has_torch_forward or not in_place:
        yield "is neither an `nn.Embedding` of the first layer nor an `nn.Linear` of the last"
        return
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq):
        yield "has `max_norm` or `scale_grad_by_freq`, which need all rows; remove the rule"
    rows = module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features
    if error := rule.divisibility_error(rows, degree):
        yield f"has {error}"


def _dropout_errors(layer: nn.Module, sharding: LayerSharding) -> Iterator[str]:
    for path, module in layer.named_modules():
        has_rule = path in sharding.rules or sharding.enclosing_region(path) is None
        if isinstance(module, nn.Dropout) and module.p > 0 and not has_rule:
            yield (
                f"`{path}` is a dropout inside a region; make it `sharded` if its features are, "
                "otherwise `replicated`"
            )


def _count_errors(
    layer: nn.Module, sharding: LayerSharding, tp_rank: TensorParallelRank
) -> Iterator[str]:
    for path, rule in sharding.rules.items():
        owner, _, name = path.rpartition(".")
        if rule.style == "count":
            degree = inner_shard(layer, sharding, path, tp_rank).total
            count = getattr(layer.get_submodule(owner), name)
            if count % degree:
                yield f"`{path}` is {count}, which {degree} ranks cannot share equally"


def _tied_weight_errors(stack: LayerStack, tp_rank: TensorParallelRank) -> Iterator[str]:
    for tied, owner in stack.tied_weights.items():
        if _shard_of(stack, tied, tp_rank) != _shard_of(stack, owner, tp_rank):
            yield (
                f"`{tied}` of model `{stack.name}` is tied to `{owner}`, but is sharded "
                "differently; shard both the same way, or neither"
            )


def _shard_of(stack: LayerStack, full_name: str, tp_rank: TensorParallelRank) -> ParamShard:
    index, name = next(
        (index, full_name.removeprefix(f"{layer_name}."))
        for index, layer_name in enumerate(stack.names)
        if full_name.startswith(f"{layer_name}.")
    )
    return param_shards(stack.layers[index], layer_sharding(stack, index), tp_rank)[name]


def _run_errors(
    stack: LayerStack, indices: list[int], tp_rank: TensorParallelRank
) -> Iterator[str]:
    """Errors of running a rank's sharded layers one after another on fake tensors."""
    rows, columns, degree = tp_rank.rows, tp_rank.columns, tp_rank.degree
    limit = stack.max_sequence
    tokens = 4 if limit is None else max(1, min(4, limit // rows))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.zeros((2, rows * tokens), dtype=torch.int64)
        for index in indices:
            last = index == len(stack.layers) - 1
            layer, name = stack.layers[index], stack.names[index]
            full_input = x if index == 0 else torch.empty(2, rows * tokens, x.shape[-1] * columns)
            full_output = _call(layer, full_input)
            sharded = shard_layer(layer, layer_sharding(stack, index), tp_rank, last=last)
            subject = f"layer `{name}` of model `{stack.name}` sharded over {degree} ranks"
            try:
                x = _call(sharded, x)
            except Exception as error:  # noqa: BLE001  a user's module may raise anything
                text = " ".join(str(error).split())[:300]
                yield f"{subject} does not run: {text}; fix its rules in `model.sharding_rules`"
                return
            expected = [2, tokens, full_output.shape[-1] // columns]
            if not last and list(x.shape) != expected:
                yield f"{subject} gives {list(x.shape)}, must give {expected}; fix its rules"
                return


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    return functional_call(layer, fake_state(layer), (x,))
