"""Where the modules of a layer make their parameters and note how these are shared."""

from dataclasses import dataclass, field

from windlass.capture.analytic.autograd import leaf
from windlass.capture.analytic.ops.collectives import Rank
from windlass.capture.analytic.strides import Shape
from windlass.capture.analytic.tensor import DataType, Tape, Tensor
from windlass.models import ShardingRule, TransformerConfig
from windlass.schema import ParameterInfo, TensorAxis

_EXPERTS = "experts"
"""Module whose parameters' first dimension counts experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Where modules make their parameters: the layer, or a module of it."""

    tape: Tape
    config: TransformerConfig
    rank: Rank
    dtype: DataType
    """Type of weights and activations."""
    parameters: list[tuple[ParameterInfo, Tensor]]
    """All parameters of the layer so far."""
    rules: list[tuple[str, ShardingRule, int, int]]
    """Path of each sharded module so far, its rule, and how many features how many ranks share."""
    feature_paths: list[str]
    """Paths of the modules so far that take or give the features between layers."""
    buffers: list[Tensor] = field(default_factory=list)
    """All buffers of the layer so far."""
    sparse: dict[str, str | None] = field(default_factory=dict)
    """Why ranks cannot share the sparse weight of a module so far, or None, by its path."""
    prefix: str = ""

    def inner(self, name: str) -> "Scope":
        """The scope of a module inside."""
        return Scope(
            tape=self.tape, config=self.config, rank=self.rank, dtype=self.dtype,
            parameters=self.parameters, rules=self.rules, feature_paths=self.feature_paths,
            buffers=self.buffers, sparse=self.sparse, prefix=f"{self.prefix}{name}.",
        )  # fmt: skip

    @property
    def path(self) -> str:
        """Path of the module in the layer."""
        return self.prefix.removesuffix(".")

    def share(self, rule: ShardingRule, total: int, ranks: int) -> None:
        """Notes that ranks share the module's features by a rule."""
        self.rules.append((self.path, rule, total, ranks))

    def note_sparse(self, error: str | None) -> None:
        """Notes that the module's weight is sparse, and why ranks cannot share it, or None."""
        self.sparse[self.path] = error

    def parameter(
        self,
        name: str,
        shape: Shape,
        *,
        sharded: int | None = None,
        replicated_over: TensorAxis | None = "all",
        tied_to: str | None = None,
    ) -> Tensor:
        """A new parameter.

        Args:
            sharded: the only dimension that the ranks divide; None if there is none.
            replicated_over: the ranks that have the same part.
            tied_to: full name of the parameter that owns the memory.
        """
        tensor = leaf(Tensor(self.tape, shape, self.dtype))
        parallel = self.rank.degree > 1
        info = ParameterInfo.model_construct(
            name=f"{self.prefix}{name}",
            shape=shape,
            tied_to=tied_to,
            shard_dim=sharded if parallel and replicated_over is None else None,
            replicated_over=replicated_over if parallel else None,
            expert=True if _EXPERTS in self.path.split(".") else None,
        )
        self.parameters.append((info, tensor))
        return tensor

    def buffer(self, shape: Shape, dtype: DataType) -> Tensor:
        """A new buffer, which every rank has in full."""
        tensor = Tensor(self.tape, shape, dtype)
        self.buffers.append(tensor)
        return tensor

    def feature_parameter(self, name: str, shape: Shape) -> Tensor:
        """A new parameter whose last dimension is features between layers, which a grid shards."""
        rank, last = self.rank, len(shape) - 1
        if rank.columns == 1:
            return self.parameter(name, shape)
        return self.parameter(
            name,
            (*shape[:-1], shape[-1] // rank.columns),
            sharded=last,
            replicated_over="tokens" if rank.rows > 1 else None,
        )
