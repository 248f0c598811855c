"""Traces the forward pass of a module as a graph whose nodes know their values at one size.

Blocks and modules of torch are nodes; all other code is followed. A value that depends on the
numbers in tokens or weights is a fake tensor, without numbers. All others, such as sizes and masks
made from them, are real, so that code may branch on them: what it branched on becomes a guard of
the graph.
"""

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.proxy import Attribute
from torch.utils._pytree import tree_leaves

from windlass.errors import ModelError
from windlass.models.inspection.shape_inference import fake_state

TRACED_TOKENS = (2, 4)
"""Batch and sequence of the tokens in a trace."""
_CONSTRUCTORS = (
    "arange", "empty", "eye", "full", "linspace", "ones", "tensor", "tril_indices",
    "triu_indices", "zeros",
)  # fmt: skip
"""Functions of torch that take sizes and no tensor, so that torch does not ask their arguments."""
_METADATA = frozenset(
    {"dim", "element_size", "is_contiguous", "is_floating_point", "ndimension", "nelement",
     "numel", "size", "stride"}
)  # fmt: skip
"""Methods of a tensor whose result does not depend on its numbers."""


class ModuleTracer(fx.Tracer):
    """Traces a module; `value`, `depends_on_data` and `guards` say what is known of its nodes.

    Args:
        blocks: paths of the blocks.
        targets: name of the argument of `forward` that takes targets; None passes none.
    """

    proxy_buffer_attributes = True

    def __init__(self, blocks: Collection[str], targets: str | None) -> None:
        super().__init__()
        self._blocks, self._targets = frozenset(blocks), targets
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: dict[fx.Node, Any] = {}
        self._data: set[fx.Node] = set()
        self._computes = False
        """Whether modules run on values, not on what stands for them."""
        self.guards: set[fx.Node] = set()
        """Calls of `require`."""

    def value(self, node: fx.Node) -> Any:  # noqa: ANN401  whatever the module computes
        """A node's value at the traced size; tensors that depend on data are fake."""
        return self._values[node]

    def depends_on_data(self, node: fx.Node) -> bool:
        """Whether a node's value depends on the numbers in tokens or weights."""
        return node in self._data

    def run(self, module: nn.Module, name: str) -> fx.Graph:
        """The graph of a module's forward pass in training.

        Raises:
            ModelError: its code depends on the numbers in tensors, or cannot be traced.
        """
        try:
            with _constructors_traced():
                return self.trace(module)
        except Exception as error:
            raise ModelError(
                f"model `{name}` cannot be taken apart: {_place(error)} "
                f"{' '.join(str(error).split())[:300] or type(error).__name__}"
            ) from error

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node: a block, or a module of torch without blocks in it."""
        if module_qualified_name in self._blocks:
            return True
        inside = f"{module_qualified_name}."
        has_blocks = any(block.startswith(inside) for block in self._blocks)
        return not has_blocks and super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,  # noqa: ARG002  the signature of torch
        concrete_args: dict[str, Any] | tuple[Any, ...] | None = None,  # noqa: ARG002
    ) -> tuple[Callable[..., Any], list[Any]]:
        """The forward pass and its arguments: the module, tokens, and targets if it takes any."""
        tokens = self.create_proxy("placeholder", "tokens", (), {})
        if self._targets is not None:
            targets = self.create_proxy("placeholder", "targets", (), {})
            root_fn = partial(root_fn, **{self._targets: targets})
        return root_fn, [self.root, tokens]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for a node while the module's code runs."""
        return _Value(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401
        """Adds a node, and computes its value."""
        node = super().create_node(kind, *args, **kwargs)
        if kind != "output":
            self._computes = True
            try:
                self._compute(node)
            finally:
                self._computes = False
        return node

    def create_arg(self, a: Any) -> Any:  # noqa: ANN401
        """An argument of a node; what stands for a tensor is none."""
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Traces the call of a module, or runs it where the value of a node is computed."""
        if self._computes:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(
        self,
        attr: str,
        attr_val: Any,  # noqa: ANN401
        parameter_proxy_cache: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """An attribute of a module; parameters and buffers are nodes."""
        if self._computes:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """The truth of a value, on which the module's code branches."""
        return bool(self.constant(obj, bool))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """The items of a value of known length."""
        length = len(self._values[obj.node])
        return iter([cast("Any", obj)[index] for index in range(length)])

    def constant(self, obj: fx.Proxy, convert: Callable[[Any], Any]) -> Any:  # noqa: ANN401
        """A value as a constant of the graph, which a guard requires from then on."""
        value = self._values[obj.node]
        if obj.node in self._data:
            raise _DataDependenceError(
                f"depends on the numbers in `{obj.node.name}`, and what is computed may depend on "
                "shapes alone; use tensor operations such as `torch.where`"
            )
        if not isinstance(value, Tensor):
            guard = self.create_proxy("call_function", require, (obj, value), {})
            self.guards.add(guard.node)
        return convert(value)

    def _compute(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            with self._fakes:
                self._values[node] = torch.zeros(TRACED_TOKENS, dtype=torch.int64, device="cpu")
            self._data.add(node)
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
        reads_data = any(each in self._data for each in inputs)
        if node.op == "get_attr":
            value = _attribute(self.root, str(node.target))
            reads_data = isinstance(value, nn.Parameter) or value.is_meta
            with self._fakes if reads_data else contextlib.nullcontext():
                self._values[node] = _fake(value) if reads_data else value
        elif node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            reads_data = reads_data or any(True for _ in module.parameters())
            with self._fakes, torch.no_grad():
                self._values[node] = functional_call(module, fake_state(module), args, kwargs)
        else:
            with self._fakes if reads_data else contextlib.nullcontext(), torch.no_grad():
                self._values[node] = _call(node, args, kwargs)
        if reads_data and not _is_metadata(node, self._values[node]):
            self._data.add(node)


class _DataDependenceError(Exception):
    """Code that branches on numbers."""


class _Value(fx.Proxy):
    """What stands for a value while the module's code runs."""

    tracer: ModuleTracer

    @property  # type: ignore[misc]  # that of an object can be set
    def __class__(self) -> type:
        """`Tensor` for a tensor, because modules of torch ask whether their arguments are some."""
        return Tensor if isinstance(self.tracer.value(self.node), Tensor) else type(self)

    def __getattr__(self, name: str) -> "_Attribute":
        if name == "_is_param":  # what makes a tensor a parameter
            raise AttributeError(name)
        return _Attribute(self, name)

    def __len__(self) -> int:
        return len(self.tracer.value(self.node))

    def __index__(self) -> int:
        return cast("int", self.tracer.constant(self, int))

    def __int__(self) -> int:
        return cast("int", self.tracer.constant(self, int))

    def __float__(self) -> float:
        return cast("float", self.tracer.constant(self, float))


class _Attribute(_Value, Attribute):
    """An attribute or method of a value."""


def require(value: object, expected: object) -> None:
    """Nothing: the value is as in the trace, at another size.

    Raises:
        ModelError: the code of the module would have taken another path.
    """
    if value != expected:
        raise ModelError(
            f"the model's code branches on sizes: a value is {value!r}, and was {expected!r} when "
            "the model was taken apart; write the model as an `nn.Sequential` of layers"
        )


fx.node.has_side_effect(require)


@contextlib.contextmanager
def _constructors_traced() -> Iterator[None]:
    originals = {name: getattr(torch, name) for name in _CONSTRUCTORS}
    try:
        for name, original in originals.items():
            setattr(torch, name, partial(_construct, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _construct(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> object:  # noqa: ANN401
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, fx.Proxy):
            return leaf.tracer.create_proxy("call_function", original, args, kwargs)
    return original(*args, **kwargs)


def _call(node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> object:  # noqa: ANN401
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return cast("Callable[..., object]", node.target)(*args, **kwargs)


def _is_metadata(node: fx.Node, value: object) -> bool:
    """Whether a value says something of a tensor's shape or type, and nothing of its numbers."""
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        return False
    return node.target in (getattr, len, torch.is_floating_point) or (
        node.op == "call_method" and node.target in _METADATA
    )


def _attribute(root: nn.Module, path: str) -> Tensor:
    owner, _, leaf = path.rpartition(".")
    return cast("Tensor", getattr(root.get_submodule(owner), leaf))


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _place(error: Exception) -> str:
    """The innermost line of code outside of torch and of this file."""
    own = (str(Path(torch.__file__).parent), __file__)
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)
    ]
    if not frames:
        return "its code"
    return f"{frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`,"
