"""Kernels of a block's feed-forward part on another stack, dense or with experts.

Letters: width d, experts E, of which a token takes k, inner width f, tensor-parallel degree t. This
module does not import torch. Sources: Megatron-Core's mixture-of-experts guide (rows are brought
into the order of their experts, and one grouped product multiplies those of all); DeepSeek-AI 2024,
arXiv:2412.19437 (shared experts, first blocks without experts).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from windlass.capture.kernel import ACTIVATION_BYTES, Linear, kernel
from windlass.models import ExpertConfig, TransformerConfig
from windlass.schema import Collective, Op, Polynomial, Precision, Stack

_SCORE_BYTES = 12
"""Bytes for each score of a router: float32, read, turned into a share, and written."""
_CHOOSING_CALLS = 6
"""Kernels that choose a token's experts and count each one's rows."""


@dataclass(frozen=True, slots=True)
class _Branch:
    """A branch of two linear layers with an activation between them."""

    widen: Linear
    activate: Op
    activate_back: Op
    narrow: Linear

    @property
    def inside(self) -> float:
        """Numbers of a token on both sides of the activation."""
        return self.narrow.rows * (self.widen.wide + self.narrow.deep)

    def forward(self, precision: Precision | None) -> Iterator[Op]:
        yield from (*self.widen.forward(precision), self.activate)
        yield from self.narrow.forward(precision)

    def backward(self, precision: Precision | None) -> Iterator[Op]:
        yield from (*self.narrow.backward(precision), self.activate_back)
        yield from self.widen.backward(precision)


class FeedForwardKernels:
    """The operations of a feed-forward part on one tensor-parallel rank.

    With sequence parallelism a rank sends its own tokens to whole experts, `1 / t` of which it
    holds before expert parallelism divides them further, as Megatron does; else, or where t does
    not divide them, it has its share of every expert's inner width.
    """

    def __init__(
        self, config: TransformerConfig, stack: Stack, tensor: int, adapter: int | None = None
    ) -> None:
        self._config, self._stack, self._tensor, self._adapter = config, stack, tensor, adapter
        self._experts = config.experts
        divides = config.experts is not None and config.experts.count % tensor == 0
        self._spread = tensor if divides and stack.sequence_parallel else 1
        self._parts = self._branches(config.experts)

    def linears(self) -> Iterator[Linear]:
        """Its linear layers in the order of a forward pass."""
        if self._experts is not None:
            yield self._router(self._experts)
        for branch in self._parts:
            yield from (branch.widen, branch.narrow)

    def forward(self, precision: Precision | None) -> Iterator[Op]:
        """Operations of a forward pass in order."""
        if self._experts is None:
            yield from self._parts[0].forward(precision)
            return
        yield from (*self._router(self._experts).forward(precision), self._choose(self._experts))
        for branch in self._parts[:-1]:
            yield from branch.forward(precision)
        yield self._moves("rows_by_expert", 2 * self._sent)
        yield from self._among_ranks(self._parts[-1].forward(precision))
        yield self._moves("weighted_sum", self._sent + self._own)

    def backward(self, precision: Precision | None) -> Iterator[Op]:
        """Operations of a backward pass in order."""
        if self._experts is None:
            yield from self._parts[0].backward(precision)
            return
        yield self._moves("weighted_sum_grads", self._own + 2 * self._sent)
        yield from self._among_ranks(self._parts[-1].backward(precision))
        yield self._moves("rows_by_expert_grad", self._sent + self._own)
        for branch in self._parts[:-1]:
            yield from branch.backward(precision)
        yield self._choose(self._experts)
        yield from self._router(self._experts).backward(precision)

    def _among_ranks(self, ops: Iterator[Op]) -> Iterator[Op]:
        """Operations of experts; expert parallelism exchanges tokens in place of what this does."""
        if self._spread == 1:
            yield from ops
            return
        sent = Collective("all_to_all", Polynomial(bs=ACTIVATION_BYTES * self._sent))
        there_or_back = kernel("all_to_all", "collective", collective=sent)
        yield there_or_back
        yield from ops
        yield there_or_back

    @property
    def saved(self) -> float:
        """Numbers of a token that are kept for a backward pass, apart from the part's input."""
        inside = sum(branch.inside for branch in self._parts)
        return inside if self._experts is None else inside + self._sent

    @property
    def narrowed(self) -> float:
        """Numbers of a token that become factors of a forward pass in a narrow precision."""
        return sum(each.rows * each.deep for each in self._narrow_linears())

    @property
    def narrowed_gradients(self) -> float:
        """Numbers of a token's gradients that become such factors."""
        return sum(each.rows * each.wide for each in self._narrow_linears())

    def _narrow_linears(self) -> Iterator[Linear]:
        return (each for each in self.linears() if each.narrows)

    @property
    def _sent(self) -> float:
        """Numbers of a token in the rows of its experts, `k d`, as many as a rank sends."""
        return (self._experts.per_token if self._experts else 0) * self._own

    @property
    def _own(self) -> float:
        """Numbers of a token, of the tokens that a rank sends to experts."""
        return self._config.width / self._spread

    @property
    def exchanges_tokens(self) -> bool:
        """Whether tensor-parallel ranks gather their tokens for it."""
        return self._spread == 1 or len(self._parts) > 1

    def _branches(self, experts: ExpertConfig | None) -> tuple[_Branch, ...]:
        """A dense branch, or a shared expert, if there is one, and the experts."""
        if experts is None:
            return (self._branch("", self._config.ffn),)
        shared = experts.shared_ffn
        own = self._branch("experts.", experts.ffn, experts)
        return (own,) if shared is None else (self._branch("shared.", shared), own)

    def _branch(self, prefix: str, ffn: float, experts: ExpertConfig | None = None) -> _Branch:
        spread = self._spread if experts else 1
        width, inner = float(self._config.width), ffn * spread / self._tensor
        gated = self._config.is_gated
        count = experts.count // spread if experts else None
        rows = experts.per_token / spread if experts else 1.0
        wide = inner * (2 if gated else 1)
        widen, narrow = (
            Linear(
                name=f"{prefix}{name}", wide=to, deep=of, experts=count, rows=rows,
                adapter=self._adapter,
            )
            for name, to, of in (("widen", wide, width), ("narrow", width, inner))
        )  # fmt: skip
        eager = self._stack.fusion == "eager"
        moved = rows * (wide + inner + (inner if gated and eager else 0.0))
        there, back = (
            self._moves("activation", times * moved, calls=2 if eager else 1) for times in (1, 2)
        )
        return _Branch(widen, there, back, narrow)

    def _router(self, experts: ExpertConfig) -> Linear:
        return Linear(
            name="router", wide=float(experts.count), deep=float(self._config.width),
            rows=1.0 / self._spread, narrows=False,
        )  # fmt: skip

    def _choose(self, experts: ExpertConfig) -> Op:
        moved = _SCORE_BYTES * experts.count / ACTIVATION_BYTES / self._spread
        return self._moves("choose_experts", moved, calls=_CHOOSING_CALLS)

    def _moves(self, name: str, numbers: float, *, calls: int = 1) -> Op:
        return kernel(name, "memory", read=ACTIVATION_BYTES * numbers, calls=calls)
