"""A layer as one slice computes it: a twin with its own part of the parameters.

Between layers each slice holds its own tokens `[b s/t d]`, and norms, dropout and residual sums
work on those. A *region*, attention or feed-forward, gathers all tokens, cuts features, and
scatters the sum of what the slices found. Sources: Shoeybi et al. 2019, arXiv:1909.08053, section
3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.

In a grid of r x c slices each holds `[b s/r d/c]`, and those of its column are its region: with
them it gathers tokens and scatters sums. A column and a row also meet the other features, with the
slices of one row: the column scatters what it finds, `[b s f/t]`, the row gathers what it takes. So
each slice has whole heads and its f/t features between the two, as in one dimension; where heads
do not divide so far, the column sums what it finds, and each slice has all f/r of its row. A map
outside of regions, as in BERT's head, takes own features too, and scatters what it finds. Source:
Xu et al. 2021, GSPMD, arXiv:2105.04663, section 5.1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.init_weights import put_parameter, weightless
from windlass.models.loss import SliceLoss, put_loss
from windlass.models.tensor_parallel.collectives import Place, gathered, own_part, scattered, summed
from windlass.models.tensor_parallel.norms import norm_kind
from windlass.models.tensor_parallel.shard_params import Piece, Share, inner, norms, pieces
from windlass.models.tensor_parallel.sharding_rules import Cut, LayerCuts, Way


def sliced(layer: nn.Module, cuts: LayerCuts, place: Place, *, last: bool) -> nn.Module:
    """A twin of a layer, on meta, as one slice computes it.

    It has the parameters of `pieces`, by the same names. The first layer takes all tokens; every
    other takes and gives `[b s/r d/c]`; the last gives what `loss_of(twin)` takes. Slices differ in
    numbers and in their share of an uneven vocabulary, where the first one's is the largest.

    Args:
        layer: whole, on any device; it stays as it is, and `faults` found nothing wrong with it.
        cuts: of the layer.
        place: of the slice. Its group is looked up only where there are numbers.
        last: whether the loss follows.
    """
    twin = weightless(layer)
    own = pieces(layer, cuts, place)
    _put_pieces(twin, own)
    for path, cut in cuts.ways.items():
        _cut_module(twin, path, cut, place, inner(layer, cuts, path, place))
    if place.columns > 1:
        for path in norms(layer, cuts):
            module = twin.get_submodule(path)
            _become(module, norm_kind(module), place=place)
    _place_dropouts(twin, layer, cuts, place)
    if cuts.first:
        twin.register_forward_hook(_GoOnWithOwn(place))
    if last:
        put_loss(twin, SliceLoss(place=place, first=_first_column(layer, cuts, own)))
    return twin


_WHOLE = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which elements of a sample `[s ... f]` a slice has."""

    tokens: Share = _WHOLE
    features: Share = _WHOLE


class SliceDropout(nn.Dropout):
    """Dropout on a slice's part of a sample: its mask must be there what the whole one's is."""

    part: Part


class _Rows(nn.Embedding):
    """A slice's rows of a table: all tokens in, all vectors out, summed over the slices."""

    place: Place
    first: int

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens - self.first
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        found = super().forward(rows.masked_fill(elsewhere, 0))
        return summed(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.place.all)


class _Columns(nn.Linear):
    """A slice's columns of the logits: own tokens in, all tokens out."""

    place: Place
    parted: bool

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(gathered(x, self.place.all))


class _Column(nn.Linear):
    """A linear map in a grid: own features in, a slice's share of the outputs out."""

    place: Place
    parted: bool
    """Whether the slices of one row share out its outputs; else each has all of them."""

    def forward(self, x: Tensor) -> Tensor:
        together = scattered if self.parted else summed
        found = together(functional.linear(x, self.weight), self.place.features)
        return found if self.bias is None else found + self.bias


class _Map(nn.Linear):
    """A linear map of each token in a grid: own features in, own features out."""

    place: Place

    def forward(self, x: Tensor) -> Tensor:
        found = scattered(functional.linear(x, self.weight), self.place.features)
        return found if self.bias is None else found + self.bias


class _Row(nn.Linear):
    """A linear map of a slice's inputs: a partial sum of, in a grid, its own features."""

    place: Place
    parted: bool
    """Whether the slices of one row share out its inputs; else each has all of them."""

    def forward(self, x: Tensor) -> Tensor:
        # Each slice adds its share of the bias. If the first one added all of it, slices would run
        # different graphs, and a compiler might order their exchanges differently.
        share = None if self.bias is None else self.bias * (1 / self.place.rows)
        x = gathered(x, self.place.features) if self.parted else x
        return functional.linear(x, self.weight, share)


@dataclass(frozen=True, slots=True)
class _Enter:
    """Gathers the tokens of what a region is called with first."""

    place: Place

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (gathered(args[0], self.place.tokens), *args[1:]), kwargs
        first = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {first: gathered(kwargs[first], self.place.tokens)}


@dataclass(frozen=True, slots=True)
class _Leave:
    """Sums what the slices found, and leaves each its own tokens."""

    place: Place

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        if isinstance(output, tuple):
            return (scattered(output[0], self.place.tokens), *output[1:])
        return scattered(output, self.place.tokens)


@dataclass(frozen=True, slots=True)
class _GoOnWithOwn:
    """Leaves a slice its own part of what all slices have."""

    place: Place

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        # A copy, for a view would hold on to all tokens as long as the next layers need their own.
        return own_part(output, self.place).clone(memory_format=torch.contiguous_format)


def _put_pieces(twin: nn.Module, own: dict[str, Piece]) -> None:
    """Gives a twin parameters of the pieces' shapes; what was one parameter stays one."""
    whole = dict(twin.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for name, piece in own.items():
        old = whole[name]
        if id(old) not in made:
            part = torch.empty(piece.shape, dtype=old.dtype, device="meta")
            made[id(old)] = nn.Parameter(part, requires_grad=old.requires_grad)
        put_parameter(twin, name, made[id(old)])


def _cut_module(twin: nn.Module, path: str, cut: Cut, place: Place, share: Share) -> None:
    """Makes one module of a twin compute a slice's share of what is cut."""
    if cut.way == "count":
        holder, _, name = path.rpartition(".")
        module = twin.get_submodule(holder)
        setattr(module, name, getattr(module, name) // share.of)
        return
    module = twin.get_submodule(path)
    if cut.way == "region":
        module.register_forward_pre_hook(_Enter(place), with_kwargs=True)
        module.register_forward_hook(_Leave(place))
    elif isinstance(module, nn.Embedding) and cut.way == "vocabulary":
        _cut_table(module, cut, place)
    elif isinstance(module, nn.Linear) and cut.way == "map":
        if place.columns > 1:
            module.in_features = module.weight.shape[1]
            _become(module, _Map, place=place)
    elif isinstance(module, nn.Linear) and cut.way in ("column", "row", "vocabulary"):
        module.out_features, module.in_features = module.weight.shape
        if cut.way != "column" or place.columns > 1:
            parted = share.of == place.degree
            _become(module, _LINEAR[cut.way], place=place, parted=parted)


_LINEAR: dict[Way, type[nn.Linear]] = {"column": _Column, "row": _Row, "vocabulary": _Columns}


def _cut_table(table: nn.Embedding, cut: Cut, place: Place) -> None:
    start, stop = cut.ranges(table.num_embeddings, place.degree, place.index)[0]
    padding = table.padding_idx
    if padding is not None:
        table.padding_idx = padding - start if start <= padding < stop else None
    table.num_embeddings = stop - start
    _become(table, _Rows, place=place, first=start)


def _become(module: nn.Module, kind: type[nn.Module], **settings: object) -> None:
    """Makes a module of a twin one of another class, with all it has and some settings more.

    So its parameters keep their names and its hooks their place, wherever it stands.
    """
    module.__class__ = kind
    vars(module).update(settings)


def _place_dropouts(twin: nn.Module, layer: nn.Module, cuts: LayerCuts, place: Place) -> None:
    """Tells each dropout which part of a sample it sees, where that is not all of it."""
    for path, module in twin.named_modules():
        if type(module) is nn.Dropout and module.p > 0 and not cuts.first:
            part = _dropped(layer, path, cuts, place)
            if part != Part():
                _become(module, SliceDropout, part=part)


def _dropped(layer: nn.Module, path: str, cuts: LayerCuts, place: Place) -> Part:
    """What a dropout sees: of a region all tokens, outside of it its own."""
    cut = cuts.ways.get(path)
    if cut is not None and cut.way == "features":
        return Part(features=inner(layer, cuts, path, place))
    own = Share(place.column, place.columns)
    inside = cuts.region(path) is not None
    return Part(tokens=_WHOLE if inside else Share(place.row, place.rows), features=own)


def _first_column(layer: nn.Module, cuts: LayerCuts, own: dict[str, Piece]) -> int | None:
    """The first of the logits' columns that a slice has; None if it has all."""
    for path, cut in cuts.ways.items():
        if cut.way == "vocabulary" and isinstance(layer.get_submodule(path), nn.Linear):
            ranges = own[f"{path}.weight" if path else "weight"].ranges[0]
            return ranges[0][0] if ranges else None
    return None
