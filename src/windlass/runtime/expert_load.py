"""ExpertLoad: counts which experts the tokens of a step took, and moves the biases that balance."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.models import Router
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.parameters import LayerParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """A router of a layer that this rank computes or another one does."""

    name: str
    """Full name of the router."""
    experts: int
    load: Tensor | None
    """`Int[E]`: tokens of each expert so far; None on a rank that does not compute the layer, or
    that computes the same tokens as another one."""
    bias: Tensor | None
    """`Float[E]`; None without one."""
    speed: float
    """How much the bias moves in a step."""
    has_capacity: bool
    """Whether its experts take only so many tokens of a sequence."""
    dropped: Tensor | None
    """`Int[]`: choices that found no room so far; None as for `load`, or without a capacity."""


class ExpertLoad:
    """The load of all experts of a model in one step, over all micro-batches and ranks.

    Args:
        layers: all layers of the model.
        templates: one template per layer.
        computed: the layers whose forward pass runs on this rank.
        counts: whether this rank's tokens count; one of all tensor-parallel ranks does.
    """

    def __init__(
        self,
        layers: Sequence[LayerParameters],
        templates: Sequence[LayerTemplate],
        computed: frozenset[int | None],
        *,
        counts: bool,
    ) -> None:
        self._own_counters: list[Tensor] = []
        self._routers: list[_Counted] = []
        for index, (layer, template) in enumerate(zip(layers, templates, strict=True)):
            for path, router in template.module.named_modules():
                if not isinstance(router, Router):
                    continue
                is_own = index in computed
                named = dict(zip(template.buffers, layer.buffers, strict=True)) if is_own else {}
                load = named.get(f"{path}.load")
                dropped = named.get(f"{path}.dropped")
                self._own_counters += [each for each in (load, dropped) if each is not None]
                self._routers.append(
                    _Counted(
                        name=f"{layer.name}.{path}",
                        experts=router.config.count,
                        load=load if counts else None,
                        bias=named.get(f"{path}.balance_bias"),
                        speed=router.config.balance_bias or 0.0,
                        has_capacity=router.config.capacity is not None,
                        dropped=dropped if counts else None,
                    )
                )
        self.totals: dict[str, tuple[int, ...]] = {}
        """Tokens that chose each expert in the last step, by the name of its router."""
        self.dropped_share: float | None = None
        """Share of all choices of the last step that found no room; None without a capacity."""

    def begin_step(self) -> None:
        """Counts from 0."""
        for counter in self._own_counters:
            counter.zero_()

    def counts(self) -> list[float]:
        """This rank's tokens of each expert of all routers, then the dropped choices of each."""
        found: list[float] = []
        for router in self._routers:
            found += [0.0] * router.experts if router.load is None else router.load.tolist()
        dropped = (router.dropped for router in self._routers)
        return [*found, *(0.0 if each is None else float(each.item()) for each in dropped)]

    def end_step(self, totals: Sequence[float]) -> None:
        """Takes the sums over all ranks, and moves each bias towards experts with fewer tokens.

        `b_e += u sign(mean - load_e)`. Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.

        Args:
            totals: sums of `counts` over all ranks.
        """
        start = 0
        for router in self._routers:
            loads = totals[start : start + router.experts]
            start += router.experts
            self.totals[router.name] = tuple(map(int, loads))
            if router.bias is not None:
                mean = sum(loads) / len(loads)
                signs = [(load < mean) - (load > mean) for load in loads]
                moves = torch.tensor(signs, dtype=router.bias.dtype) * router.speed
                router.bias.add_(moves.to(router.bias.device))
        limited = [sum(self.totals[each.name]) for each in self._routers if each.has_capacity]
        self.dropped_share = sum(totals[start:]) / max(1, sum(limited)) if limited else None
