"""Selective: a forward pass that keeps what its large products give, and runs the rest again.

Products with weights and fused attention take nearly all the time of a layer, the rest (norms,
activation functions, residual sums, dropout) most of the memory. So what the former give is kept,
and the backward pass computes the latter again from it. Products of activations with each other
are run again too: scores of attention that is not fused are as large as they are cheap.

Of a layer's slices sums are kept and the partial sums that they are of are not, which are as large
as the whole; what is gathered, as large too, is gathered again.

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

from windlass.models.tensor_parallel import collectives as exchange  # noqa: F401  makes the operations of `_SUMS`

_PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.addmm})
_SUMS = frozenset({torch.ops.windlass.scatter_sum, torch.ops.windlass.sum_slices})
_KEPT = _PRODUCTS | _SUMS
_FUSED_ATTENTION = "_scaled_dot_product_"
"""How the names of torch's fused attention kernels begin, on every device."""


def selective(run: Callable[..., Tensor], *arguments: object, draws: bool) -> Tensor:
    """What `run` gives, with a backward pass that runs all but its large products again.

    Args:
        run: the forward pass; what it reads must not change before its backward pass.
        arguments: of it.
        draws: whether it draws from torch's own generator, whose state is then kept for it.
    """
    found: Tensor = checkpoint(
        run, *arguments, use_reentrant=False, preserve_rng_state=draws, context_fn=_contexts
    )
    return found


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    kept = deque[_Kept]()
    return _Keeping(kept), _Giving(kept)


class _Kept(NamedTuple):
    """What an operation gave, and how often each of its tensors had been written to."""

    given: Any
    """Whatever ATen gives."""
    versions: tuple[int, ...]

    @classmethod
    def of(cls, given: Any) -> "_Kept":  # noqa: ANN401
        """The same tensors, which lead back to no graph: that would lead back to them."""
        # Below autograd a view has a version of its own, unless this key is let in.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001
            apart = tree_map_only(Tensor, Tensor.detach, given)
        return cls(apart, _versions(apart))

    def unchanged(self) -> Any:  # noqa: ANN401
        """What was given.

        Raises:
            RuntimeError: it has been written to since.
        """
        if _versions(self.given) != self.versions:
            raise RuntimeError("what a large product gave was changed in place; it cannot be kept")
        return self.given


def _versions(given: Any) -> tuple[int, ...]:  # noqa: ANN401
    tensors = given if isinstance(given, tuple | list) else (given,)
    return tuple(each._version for each in tensors if isinstance(each, Tensor))  # noqa: SLF001


class _InTurn(TorchDispatchMode):
    """A pass in which some operations are not like others; they come in the same turn each time."""

    def __init__(self, kept: deque[_Kept]) -> None:
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
        return self._given(run, func, args) if _keeps(func) else run()

    def _given(self, run: Callable[[], Any], func: OpOverload, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """What an operation gives whose outcome is kept."""
        raise NotImplementedError


class _Keeping(_InTurn):
    """The forward pass, as it runs the first time."""

    def _given(self, run: Callable[[], Any], func: OpOverload, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        given = run()
        if func.overloadpacket in _SUMS:
            self._empty(args[0])
        self._kept.append(_Kept.of(given))
        return given

    def _empty(self, partial_sum: Tensor) -> None:
        """Leaves only the shape of a partial sum: when it comes again, its sum is there already."""
        last = self._kept[-1].given if self._kept else None
        if isinstance(last, Tensor) and last.untyped_storage() is partial_sum.untyped_storage():
            self._kept[-1] = _Kept.of(last.new_empty(()).expand(last.shape))


class _Giving(_InTurn):
    """The same again, given what was kept."""

    def _given(self, run: Callable[[], Any], _: OpOverload, __: tuple[Any, ...]) -> Any:  # noqa: ANN401, ARG002  it need not run again
        return self._kept.popleft().unchanged()


def _keeps(func: OpOverload) -> bool:
    packet = func.overloadpacket
    return packet in _KEPT or packet.__name__.startswith(_FUSED_ATTENTION)
