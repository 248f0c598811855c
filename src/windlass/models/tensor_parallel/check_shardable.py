"""What of a chain cannot be cut over slices, each with the way out."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from windlass.models.layer_stack import Chain, cuts_of
from windlass.models.shape_inference import fake_state
from windlass.models.tensor_parallel.collectives import Place
from windlass.models.tensor_parallel.shard_module import sliced
from windlass.models.tensor_parallel.shard_params import Piece, inner, norms, pieces
from windlass.models.tensor_parallel.sharding_rules import Cut, LayerCuts

_EACH_TOKEN_ALONE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)
"""Modules of torch that compute each token's vector from that vector only."""
_NORMS = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_WAY_OUT = (
    "name its regions, columns and rows in `model.sharding_rules`, or say `alone` if it treats each token by "
    "itself"
)


def faults(chain: Chain, degree: int, *, columns: int = 1) -> tuple[str, ...]:
    """All that cannot be cut over `degree` slices; empty for a chain that can.

    Rules that a user named are tried on tensors without memory too. Whether they compute what the
    whole layers compute only a comparison can tell.

    Args:
        chain: the model.
        degree: slices of each layer.
        columns: of their grid.
    """
    if degree == 1:
        return ()
    place = Place(degree=degree, columns=columns)
    firsts = {kind: index for index, kind in reversed(list(enumerate(chain.kinds)))}
    found = [
        f"layer `{chain.names[index]}` of model `{chain.name}`: {fault}"
        for index in sorted(firsts.values())
        for fault in _of_layer(chain, index, place)
    ]
    found = found or list(_of_ties(chain, place))
    if not found and chain.cuts:
        found = list(_of_trial(chain, sorted(firsts.values()), place))
    return tuple(found)


def _of_layer(chain: Chain, index: int, place: Place) -> list[str]:
    layer, cuts = chain.layers[index], cuts_of(chain, index)
    if not cuts.ways and not cuts.first and not isinstance(layer, _EACH_TOKEN_ALONE):
        return [f"no rule says how a `{type(layer).__name__}` is cut; {_WAY_OUT}"]
    last = index == len(chain.layers) - 1
    found = [
        f"`{path or type(layer).__name__}` {fault}"
        for path, cut in cuts.ways.items()
        if cut.way != "count"
        for fault in _of_module(
            layer, cuts, path, cut, inner(layer, cuts, path, place).of, last=last
        )
    ]
    found += _of_dropouts(layer, cuts)
    if place.columns > 1 and not cuts.first:
        found += _of_features(layer, cuts, place)
    # What is counted follows from what is cut, which says it better.
    return found or list(_of_counts(layer, cuts, place))


def _of_features(layer: nn.Module, cuts: LayerCuts, place: Place) -> Iterator[str]:
    """What needs all features of a token, where slices share them out."""
    normed = frozenset(norms(layer, cuts))
    for path, module in layer.named_modules():
        name, cut = f"`{path or type(module).__name__}`", cuts.ways.get(path)
        if path in normed and type(module).forward not in _NORMS:
            yield f"{name} is a norm with a way of its own; in a grid only torch's can be cut"
        elif path in normed or (cut is not None and cut.way in ("column", "row", "map")):
            uneven = (width for width in _features(module, cut) if width % place.columns)
            if width := next(uneven, None):
                yield (
                    f"{name} has {width} features, which {place.columns} columns cannot share "
                    "equally; take as many columns as divide them"
                )
        elif (cut is None or cut.way != "vocabulary") and _needs_whole(module, cuts, path):
            yield (
                f"{name} has weights for all features of a token, which in a grid lie on "
                f"{place.columns} slices; name it a column, row or vocabulary, or cut in one "
                "dimension"
            )


def _features(module: nn.Module, cut: Cut | None) -> tuple[int, ...]:
    """Features between layers that a norm, a column, a row or a map has to do with."""
    if isinstance(module, nn.Linear) and cut is not None:
        sides = {"row": (module.out_features,), "map": (module.in_features, module.out_features)}
        return sides.get(cut.way, (module.in_features,))
    shape: tuple[int, ...] = getattr(module, "normalized_shape", (1,))
    return shape[:1]


def _needs_whole(module: nn.Module, cuts: LayerCuts, path: str) -> bool:
    """Whether a module has parameters of its own and is not between a region's column and row."""
    owns = any(True for _ in module.parameters(recurse=False))
    between = cuts.region(path) is not None and isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    return owns and not between


def _of_module(
    layer: nn.Module, cuts: LayerCuts, path: str, cut: Cut, degree: int, *, last: bool
) -> Iterator[str]:
    module = layer.get_submodule(path)
    if cut.way == "region":
        yield from _of_region(cuts, path)
    elif cut.way in ("column", "row"):
        yield from _of_linear(cuts, path, module, cut, degree)
    elif cut.way == "map":
        yield from _of_map(cuts, path, module, last=last)
    elif cut.way == "vocabulary":
        yield from _of_vocabulary(module, cut, degree, first=cuts.first, last=last)
    elif cut.way in ("features", "whole"):
        if not isinstance(module, nn.Dropout) or cuts.region(path) is None:
            yield f"is no dropout in a region; only those can be `{cut.way}`"
    elif path:
        yield "is no layer of its own, and only those can be `alone`"


def _of_region(cuts: LayerCuts, path: str) -> Iterator[str]:
    inside = {cut.way for at, cut in cuts.ways.items() if cuts.region(at) == path}
    if cuts.first:
        yield "is a region of the first layer, whose slices have all tokens; cut no more than rows"
    if any(at != path and LayerCuts(ways={at: cut}, first=False).region(path) is not None
           for at, cut in cuts.ways.items()):  # fmt: skip
        yield "is a region inside a region; name only one of them"
    elif missing := {"column", "row"} - inside:
        yield f"is a region without any {' or '.join(sorted(missing))}; name them, or no region"


def _of_linear(
    cuts: LayerCuts, path: str, module: nn.Module, cut: Cut, degree: int
) -> Iterator[str]:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        yield f"is a `{type(module).__name__}`; only an `nn.Linear` can be a {cut.way}"
        return
    if cuts.region(path) is None:
        yield f"is a {cut.way} outside of any region; name the module around it a `region`"
    outputs, inputs = module.weight.shape
    if fault := cut.fault(outputs if cut.way == "column" else inputs, degree):
        yield f"has {fault}"


def _of_map(cuts: LayerCuts, path: str, module: nn.Module, *, last: bool) -> Iterator[str]:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        yield f"is a `{type(module).__name__}`; only an `nn.Linear` can be a map"
    elif cuts.first or cuts.region(path) is not None:
        yield "is a map in a region or in the first layer; name it a column or a row, or not at all"
    elif last and not path:
        yield "is a map that gives logits; name it a vocabulary"


def _of_vocabulary(
    module: nn.Module, cut: Cut, degree: int, *, first: bool, last: bool
) -> Iterator[str]:
    plain = type(module).forward in (nn.Embedding.forward, nn.Linear.forward)
    there = first if isinstance(module, nn.Embedding) else last
    if not isinstance(module, (nn.Embedding, nn.Linear)) or not plain or not there:
        yield "is neither an `nn.Embedding` of the first layer nor an `nn.Linear` of the last"
        return
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq):
        yield "has `max_norm` or `scale_grad_by_freq`, which ask for all rows; leave it whole"
    rows = module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features
    if fault := cut.fault(rows, degree):
        yield f"has {fault}"


def _of_dropouts(layer: nn.Module, cuts: LayerCuts) -> Iterator[str]:
    for path, module in layer.named_modules():
        known = path in cuts.ways or cuts.region(path) is None
        if isinstance(module, nn.Dropout) and module.p > 0 and not known:
            yield f"`{path}` drops inside a region; say `features` if they are cut, or `whole`"


def _of_counts(layer: nn.Module, cuts: LayerCuts, place: Place) -> Iterator[str]:
    for path, cut in cuts.ways.items():
        holder, _, name = path.rpartition(".")
        if cut.way == "count":
            degree = inner(layer, cuts, path, place).of
            count = getattr(layer.get_submodule(holder), name)
            if count % degree:
                yield f"`{path}` is {count}, which {degree} slices cannot share equally"


def _of_ties(chain: Chain, place: Place) -> Iterator[str]:
    for tied, owner in chain.ties.items():
        one, other = (_piece(chain, name, place) for name in (tied, owner))
        if one != other:
            yield (
                f"`{tied}` of model `{chain.name}` is `{owner}`, but is cut otherwise; cut both "
                "the same way, or neither"
            )


def _piece(chain: Chain, full: str, place: Place) -> Piece:
    index, name = next(
        (index, full.removeprefix(f"{layer}."))
        for index, layer in enumerate(chain.names)
        if full.startswith(f"{layer}.")
    )
    return pieces(chain.layers[index], cuts_of(chain, index), place)[name]


def _of_trial(chain: Chain, firsts: list[int], place: Place) -> Iterator[str]:
    """Faults that show when a slice's twins run one after another on tensors without memory."""
    rows, slices = place.rows, place.degree
    own = 4 if chain.max_sequence is None else max(1, min(4, chain.max_sequence // rows))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.zeros((2, rows * own), dtype=torch.int64)
        for index in firsts:
            last = index == len(chain.layers) - 1
            layer, name = chain.layers[index], chain.names[index]
            whole = x if index == 0 else torch.empty(2, rows * own, x.shape[-1] * place.columns)
            wanted = _call(layer, whole)
            twin = sliced(layer, cuts_of(chain, index), place, last=last)
            trouble = f"layer `{name}` of model `{chain.name}` cut over {slices} slices"
            try:
                x = _call(twin, x)
            except Exception as error:  # noqa: BLE001  a user's module may raise whatever it likes
                text = " ".join(str(error).split())[:300]
                yield f"{trouble} does not run: {text}; mend its rules in `model.sharding_rules`"
                return
            due = [2, own, wanted.shape[-1] // place.columns]
            if not last and list(x.shape) != due:
                yield f"{trouble} gives {list(x.shape)}, must give {due}; mend its rules"
                return


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    return functional_call(layer, fake_state(layer), (x,))
