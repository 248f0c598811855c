"""Selective activation checkpointing: keep the outputs of large products, recompute the rest.

Products with weights and fused attention take nearly all of a layer's time; everything else (norms,
activation functions, residual sums, dropout) takes most of its memory. So the outputs of the former
are kept, and the backward pass recomputes the latter from them. Products of two activations are
recomputed as well: the scores of unfused attention are as large as they are cheap.

In a tensor-parallel layer the outputs of reductions are kept, but not the partial sums that go into
them, which are as large as the full tensor; gathered tensors, as large too, are gathered again. So
it is where ranks divide experts: rows that came back are kept, and not the experts' results that
were sent; rows are sent to their experts again, in the numbers that ranks told each other before.

Source: Korthikanti et al. 2022, arXiv:2205.05198, section 5.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from windlass.models.tensor_parallel import collectives  # noqa: F401  registers `torch.ops.windlass`

_PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.addmm})
_OWN_PRODUCTS = frozenset(
    {"windlass::block_linear", "windlass::block_feed_forward", "windlass::grouped_linear"}
)
_ROW_COUNTS = "windlass::exchange_expert_counts"
"""Numbers that the host waits for, a few bytes."""
_COUNTERS = frozenset({"windlass::add_expert_load", "windlass::add_dropped_choices"})
"""What counts a forward pass, and so runs in one only."""
_REDUCTIONS = frozenset(
    {"windlass::reduce_scatter", "windlass::all_reduce", "windlass::return_expert_rows"}
)
_FUSED_ATTENTION = "_scaled_dot_product_"
"""Prefix of the names of torch's fused attention kernels on every device."""


def checkpoint_selectively(
    run: Callable[..., Tensor], *arguments: object, preserve_rng: bool
) -> Tensor:
    """The output of `run`, with a backward pass that recomputes all but its large products.

    Args:
        run: the forward pass; the tensors it reads must not change before its backward pass.
        preserve_rng: whether `run` draws from torch's own generator, whose state is then saved for
            the recomputation.
    """
    output: Tensor = checkpoint(
        run,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=preserve_rng,
        context_fn=_contexts,
    )
    return output


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Modes for the forward pass and for its recomputation, which share one queue of outputs."""
    kept = deque[_KeptOutput]()
    return _KeepOutputs(kept), _ReplayOutputs(kept)


class _KeptOutput(NamedTuple):
    """The output of an operation, and the version counter of each of its tensors."""

    output: Any
    """Whatever the ATen operation returned."""
    versions: tuple[int, ...]

    @classmethod
    def detached(cls, output: Any) -> "_KeptOutput":  # noqa: ANN401
        """The same tensors without their autograd graph, which would refer back to them."""
        # Below autograd a view has a version counter of its own, unless this key is included.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001
            output = tree_map_only(Tensor, Tensor.detach, output)
        return cls(output, _versions(output))

    def unchanged(self) -> Any:  # noqa: ANN401
        """The kept output.

        Raises:
            RuntimeError: it was modified in place since.
        """
        if _versions(self.output) != self.versions:
            raise RuntimeError(
                "the output of a large product was changed in place; it cannot be kept"
            )
        return self.output


def _versions(output: Any) -> tuple[int, ...]:  # noqa: ANN401
    tensors = output if isinstance(output, tuple | list) else (output,)
    return tuple(tensor._version for tensor in tensors if isinstance(tensor, Tensor))  # noqa: SLF001


class _KeptOutputMode(TorchDispatchMode):
    """Treats operations whose output is kept specially; both passes run them in the same order."""

    def __init__(self, kept: deque[_KeptOutput]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        run = partial(func, *args, **(kwargs or {}))
        return self._kept_output(run, func, args) if _is_kept(func) else run()

    def _kept_output(self, run: Callable[[], Any], func: OpOverload, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """The output of an operation whose output is kept."""
        raise NotImplementedError


class _KeepOutputs(_KeptOutputMode):
    """The forward pass, which runs these operations and keeps their outputs."""

    def _kept_output(self, run: Callable[[], Any], func: OpOverload, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        output = run()
        if func.name() in _REDUCTIONS:
            self._drop_partial_sum(args[0])
        self._kept.append(_KeptOutput.detached(output))
        return output

    def _drop_partial_sum(self, partial_sum: Tensor) -> None:
        """Keeps only the shape of a partial sum: the recomputation has its reduction already."""
        last = self._kept[-1].output if self._kept else None
        if isinstance(last, Tensor) and last.untyped_storage() is partial_sum.untyped_storage():
            self._kept[-1] = _KeptOutput.detached(last.new_empty(()).expand(last.shape))


class _ReplayOutputs(_KeptOutputMode):
    """The recomputation, which takes these outputs from the queue."""

    def _kept_output(self, run: Callable[[], Any], _: OpOverload, __: tuple[Any, ...]) -> Any:  # noqa: ANN401, ARG002  it does not run again
        return self._kept.popleft().unchanged()


def _is_kept(func: OpOverload) -> bool:
    packet, name = func.overloadpacket, func.name()
    is_own = name in _OWN_PRODUCTS | _COUNTERS | _REDUCTIONS or name == _ROW_COUNTS
    return is_own or packet in _PRODUCTS or packet.__name__.startswith(_FUSED_ATTENTION)
