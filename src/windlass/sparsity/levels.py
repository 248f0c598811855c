"""How many blocks or weights each part of a model keeps; this module does not import torch."""

from collections.abc import Iterator, Mapping
from math import gcd
from typing import NamedTuple

from windlass.errors import InputErrors, ModelError
from windlass.schema import BLOCK_SIZES, SparsityRequest

LEAST_KEPT_BLOCKS = 2
"""Kept blocks a row below which blocks train worse than single weights of the same number."""
_MOST_GROUPS = 8
"""Groups of columns that keep as many blocks: the largest tensor-parallel degree that can divide
the columns of a weight."""
_TOLERANCE = 0.025
"""Relative difference of the kept share up to which a level means the legal one beside it: 0.833
means 10 of 12 blocks."""
_SCALES = 201
"""Scales of the Erdos-Renyi distribution that are tried around the one that needs no rounding."""


class BlockPart(NamedTuple):
    """Consecutive block rows of a weight that keep equal numbers of blocks, such as the queries."""

    rows: int
    """Block rows."""
    kept: int
    """Kept blocks in each of them."""


def column_groups(columns: int, kept: int) -> int:
    """Number of column groups of equal counts: the largest power of two up to 8 that divides both.

    Args:
        kept: kept blocks a row.
    """
    return gcd(_MOST_GROUPS, columns, kept)


class WeightPart(NamedTuple):
    """A weight, or the part of a fused weight that has one role."""

    role: str
    """A role of the request, or the pattern of module names that selects it."""
    outputs: int
    inputs: int


def kept_counts(request: SparsityRequest, parts: Mapping[WeightPart, int]) -> dict[WeightPart, int]:
    """Kept blocks in each block row of every part; without blocks, kept weights of the whole part.

    Each number is the nearest legal one. A legal number of blocks is at least 2 a row, and makes
    equal columns; with `block-diagonal` it also makes equal tiles.

    Args:
        parts: number of equal parts in the model, by part.

    Raises:
        ModelError: what cannot be, with the nearest legal level.
    """
    faults = list(_shape_faults(request, parts))
    # The level of a leg on the way to the one that is asked for is rounded, however far that is.
    if not faults and request.leg in (0, request.legs - 1):
        faults = list(_level_faults(request, parts))
    if len(faults) == 1:
        raise ModelError(faults[0])
    if faults:
        raise InputErrors(faults)
    return _nearest_counts(request, parts)


def kept_share(request: SparsityRequest, parts: Mapping[WeightPart, int]) -> float:
    """Share of the weights of all parts together that `kept_counts` keeps."""
    return _share(request, parts, kept_counts(request, parts))


def _shape_faults(request: SparsityRequest, parts: Mapping[WeightPart, int]) -> Iterator[str]:
    """Parts that a pattern cannot divide, and roles without a part."""
    roles = {part.role for part in parts}
    for role in request.roles or {}:
        if role not in roles:
            yield f"`sparsity.roles.{role}` names no weight of this model; leave it out"
    for part in parts:
        if _own_level(request, part) == 0:
            continue
        name = f"`{part.role}` ({part.outputs} x {part.inputs})"
        if request.n_of_m and part.inputs % request.n_of_m[1]:
            n, m = request.n_of_m
            yield (
                f"`sparsity.pattern` = {request.pattern} keeps {n} of every {m} inputs, which do "
                f"not divide the {part.inputs} of {name}; choose an m that does, or a dense role"
            )
        elif request.is_blocked and (part.outputs % request.block or part.inputs % request.block):
            sizes = [b for b in BLOCK_SIZES if not part.outputs % b and not part.inputs % b]
            fits = f"set `sparsity.block` = {sizes[-1]}" if sizes else "no size of blocks does"
            yield (
                f"blocks of {request.block} x {request.block} do not divide {name}; {fits}, or "
                f"keep it dense by {_dense_role(part)}"
            )


def _level_faults(request: SparsityRequest, parts: Mapping[WeightPart, int]) -> Iterator[str]:
    """Levels that are too far from every legal one."""
    for key, asked, group in _level_groups(request, parts):
        if _fits(request, asked, group):
            continue
        nearest = _nearest_level(request, key, asked, group)
        smaller = _smaller_block(request, parts)
        ways = [f"set `{key}` = {nearest:.4g}, the nearest legal level"] if nearest else []
        ways += [f"set `sparsity.block` = {smaller}"] if smaller else []
        ways = ways or ["choose a wider model, in which blocks leave more levels"]
        counts = _nearest_counts(request, group)
        part = max(group, key=lambda each: _deviation(request, each, counts[each], 1 - asked))
        yield f"`{key}` = {asked:g} {_misfit(request, part, asked)}; {', or '.join(ways)}"


def _fits(request: SparsityRequest, asked: float, group: Mapping[WeightPart, int]) -> bool:
    """Whether the legal numbers nearest to a level are near enough."""
    share = _share(request, group, _nearest_counts(request, group))
    return abs(share - (1 - asked)) <= _TOLERANCE * (1 - asked)


def _nearest_level(
    request: SparsityRequest, key: str, asked: float, group: Mapping[WeightPart, int]
) -> float | None:
    """The legal level that is nearest to the one asked for; None if there is none."""
    shares = {_share(request, group, _nearest_counts(request, group))}
    for part in group:
        columns = part.inputs // request.block
        shares |= {kept / columns for kept in _legal_counts(request, part)}
    for level in sorted((1 - share for share in shares), key=lambda each: abs(each - asked)):
        if level > 0 and _fits(_with_level(request, key, level), level, group):
            return level
    return None


def _with_level(request: SparsityRequest, key: str, level: float) -> SparsityRequest:
    if key == "sparsity.level":
        return request.model_copy(update={"level": level})
    name = key.rpartition(".")[2]
    roles = {role: level if role == name else own for role, own in (request.roles or {}).items()}
    return request.model_copy(update={"roles": roles})


def _misfit(request: SparsityRequest, part: WeightPart, asked: float) -> str:
    """Why a level is not legal, shown by one part."""
    columns = part.inputs // request.block
    kept = (1 - asked) * columns
    where = f"`{part.role}` ({part.outputs} x {part.inputs}, blocks of {request.block})"
    if request.distribution != "uniform" and _own_level(request, part) is None:
        return f"cannot be spread by {request.distribution} in whole blocks of {request.block}"
    words = f"means {kept:.4g} of {columns} blocks a row in {where}"
    if kept < LEAST_KEPT_BLOCKS:
        return f"{words}, fewer than {LEAST_KEPT_BLOCKS}"
    return f"{words}, no number that makes equal rows and columns"


def _smaller_block(request: SparsityRequest, parts: Mapping[WeightPart, int]) -> int | None:
    """The largest smaller block at which every level is legal."""
    for block in reversed(BLOCK_SIZES):
        smaller = request.model_copy(update={"block": block})
        if block < request.block and not any(_shape_faults(smaller, parts)):
            groups = _level_groups(smaller, parts)
            if all(_fits(smaller, asked, group) for _, asked, group in groups):
                return block
    return None


def _level_groups(
    request: SparsityRequest, parts: Mapping[WeightPart, int]
) -> Iterator[tuple[str, float, Mapping[WeightPart, int]]]:
    """The key of each level, the level, and the parts that have it together."""
    rest = {part: count for part, count in parts.items() if _own_level(request, part) is None}
    if rest and request.target_level:
        yield "sparsity.level", request.target_level, rest
    for role, level in (request.roles or {}).items():
        if level:
            same = {part: count for part, count in parts.items() if part.role == role}
            yield f"sparsity.roles.{role}", level, same


def _nearest_counts(
    request: SparsityRequest, parts: Mapping[WeightPart, int]
) -> dict[WeightPart, int]:
    """The nearest legal number of each part, for shapes that the pattern divides."""
    densities: dict[WeightPart, float] = {}
    rest: dict[WeightPart, int] = {}
    for part, count in parts.items():
        level = _own_level(request, part)
        if level is not None:
            densities[part] = 1 - level
        else:
            rest[part] = count
    if request.distribution == "uniform" or not rest:
        densities |= dict.fromkeys(rest, 1 - request.target_level)
    else:
        densities |= _erdos_renyi_densities(request, rest)
    return {part: _nearest_count(request, part, densities[part]) for part in parts}


def _erdos_renyi_densities(
    request: SparsityRequest, parts: Mapping[WeightPart, int]
) -> dict[WeightPart, float]:
    """Kept share of each part, in proportion to `(in + out) / (in * out)`, at most all.

    The scale is that whose legal numbers together are nearest to the level. Source: Mocanu et al.
    2018, Nature Communications 9:2383; Evci et al. 2020, arXiv:1911.11134, section 3.
    """
    wanted = 1 - request.target_level
    ratio = {part: (part.inputs + part.outputs) / (part.inputs * part.outputs) for part in parts}

    def densities(scale: float) -> dict[WeightPart, float]:
        return {part: min(1.0, scale * ratio[part]) for part in parts}

    def rounding_error(scale: float) -> float:
        counts = {
            part: _nearest_count(request, part, density)
            for part, density in densities(scale).items()
        }
        return abs(_share(request, parts, counts) - wanted)

    total = sum(part.outputs * part.inputs * count for part, count in parts.items())
    low, high = 0.0, 1 / min(ratio.values())
    for _ in range(60):
        middle = (low + high) / 2
        kept = sum(
            density * part.outputs * part.inputs * parts[part]
            for part, density in densities(middle).items()
        )
        low, high = (middle, high) if kept < wanted * total else (low, middle)
    half = _SCALES // 2
    # Nearer scales first, so that among equal errors the least changed one wins.
    scales = [low * (1 + step / _SCALES) for step in sorted(range(-half, half + 1), key=abs)]
    return densities(min(scales, key=rounding_error))


def _nearest_count(request: SparsityRequest, part: WeightPart, density: float) -> int:
    """The legal number that is nearest to a density; of two equally near ones the larger."""
    if not request.is_blocked:
        weights = part.outputs * part.inputs
        return max(1, round(density * weights))
    columns = part.inputs // request.block
    legal = _legal_counts(request, part)
    return min(legal, key=lambda kept: abs(kept - density * columns), default=columns)


def _legal_counts(request: SparsityRequest, part: WeightPart) -> tuple[int, ...]:
    """The numbers of kept blocks a row that a pattern allows, largest first."""
    rows, columns = part.outputs // request.block, part.inputs // request.block
    counts = range(columns, LEAST_KEPT_BLOCKS - 1, -1)
    if request.pattern == "block-diagonal":
        return tuple(n for n in counts if columns % n == 0 and rows % (columns // n) == 0)
    return tuple(n for n in counts if rows * n % columns == 0)


def _share(
    request: SparsityRequest, parts: Mapping[WeightPart, int], counts: Mapping[WeightPart, int]
) -> float:
    """Kept share of all weights of some parts together."""
    kept = total = 0
    for part, count in parts.items():
        weights = part.outputs * part.inputs
        # A row that keeps n blocks of B x B keeps n * B inputs of each of its outputs.
        of_part = (
            counts[part] * request.block * part.outputs if request.is_blocked else counts[part]
        )
        kept, total = kept + of_part * count, total + weights * count
    return kept / total


def _deviation(request: SparsityRequest, part: WeightPart, count: int, density: float) -> float:
    return abs(count - density * (part.inputs // request.block)) / part.inputs


def _own_level(request: SparsityRequest, part: WeightPart) -> float | None:
    """The level that the request gives to a part's role alone."""
    return next((level for role, level in (request.roles or {}).items() if role == part.role), None)


def _dense_role(part: WeightPart) -> str:
    """How a request keeps a part dense."""
    return f"`sparsity.roles.{part.role}` = 0"
