"""Rules: how a layer is cut, as its modules know themselves and as patterns of names say."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from windlass.models.cuts import Cut, Cuttable, LayerCuts


def layer_cuts(layer: nn.Module, name: str, rules: Mapping[str, Cut], *, first: bool) -> LayerCuts:
    """How a layer is cut.

    Args:
        layer: on any device.
        name: its name in the chain.
        rules: ways by pattern of full names, `*` for one part between dots; they go before what
            modules know themselves, and a later one before an earlier one.
        first: whether it takes tokens.
    """
    ways: dict[str, Cut] = {}
    for path, module in layer.named_modules():
        if isinstance(module, Cuttable):
            ways |= {_joined(path, inner): cut for inner, cut in module.cuts().items()}
    for pattern, cut in rules.items():
        ways |= dict.fromkeys(matches(layer, name, pattern, cut), cut)
    return LayerCuts(ways=ways, first=first)


def matches(layer: nn.Module, name: str, pattern: str, cut: Cut) -> Iterator[str]:
    """Paths inside a layer that a rule is for."""
    settings = _counts(layer) if cut.way == "count" else (path for path, _ in layer.named_modules())
    wanted = pattern.split(".")
    for path in settings:
        parts = _joined(name, path).split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield path


def _counts(layer: nn.Module) -> Iterator[str]:
    """Settings of a layer's modules that are whole numbers."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool):
                yield _joined(path, name)


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))
