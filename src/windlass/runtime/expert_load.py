"""ExpertLoad: counts which experts the tokens of a step took, and moves the biases that balance."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.models import Router
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.parameters import LayerParameters
from windlass.torch_ext import Device


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
        counts: whether this rank's tokens count; one of all tensor-parallel ranks does.
    """

    def __init__(
        self,
        layers: Sequence[LayerParameters],
        templates: Sequence[LayerTemplate],
        computed: frozenset[int | None],
        device: Device,
        *,
        counts: bool,
    ) -> None:
        self._device = device
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
        most = max((router.experts for router in self._routers), default=0)
        self._nothing = torch.zeros(most, dtype=torch.int64, device=device.torch_device)
        """What a router counts that this rank does not run."""
        self.totals: dict[str, tuple[int, ...]] = {}
        """Tokens that chose each expert in the last step, by the name of its router."""
        self.dropped_share: float | None = None
        """Share of all choices of the last step that found no room; None without a capacity."""

    def begin_step(self) -> None:
        """Counts from 0."""
        if self._own_counters:
            torch._foreach_zero_(self._own_counters)

    def beside(self, totals: Tensor) -> Tensor:
        """Numbers of the device that the host reads, and counts behind them: one transfer for all.

        Returns:
            `Float[m + n]`: behind them this rank's tokens of each expert of all routers, then the
            dropped choices of each.
        """
        if not self._routers:
            return totals
        loads = [(each.load, each.experts) for each in self._routers]
        dropped = [(each.dropped, 1) for each in self._routers]
        counts = [
            self._nothing[:size] if count is None else count.view(-1)
            for count, size in (*loads, *dropped)
        ]
        return torch.cat((totals, torch.cat(counts).to(totals.dtype)))

    def end_step(self, totals: Sequence[float]) -> None:
        """Takes the sums over all ranks, and moves each bias towards experts with fewer tokens.

        `b_e += u sign(mean - load_e)`. Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.

        Args:
            totals: sums over all ranks of what `beside` adds.
        """
        start, biases, moves = 0, list[Tensor](), list[Tensor]()
        for router in self._routers:
            loads = totals[start : start + router.experts]
            start += router.experts
            self.totals[router.name] = tuple(map(int, loads))
            if router.bias is not None:
                mean = sum(loads) / len(loads)
                signs = [(load < mean) - (load > mean) for load in loads]
                biases.append(router.bias)
                moves.append(torch.tensor(signs, dtype=router.bias.dtype) * router.speed)
        if biases:
            placed = self._device.to_device(torch.cat(moves))
            torch._foreach_add_(biases, placed.split([len(move) for move in moves]))
        limited = [sum(self.totals[each.name]) for each in self._routers if each.has_capacity]
        self.dropped_share = sum(totals[start:]) / max(1, sum(limited)) if limited else None
