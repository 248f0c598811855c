"""LayerCost: the ops and memory of a layer, by micro-batch and sequence."""

from operator import add
from typing import Literal, NamedTuple, Self

from windlass.document import Document
from windlass.schema.tensor_grid import TensorAxis

Precision = Literal["float32", "tf32", "bfloat16", "float16", "float64", "float8", "float4"]
"""Data type that layers compute in. With bfloat16 and float16 the optimizer keeps float32 master
weights; float16, which only a request asks for, scales the loss too. With `tf32` all is in float32,
but products round their factors to TF32; only a request asks for it. `float64` is for verification
on a CPU; planning never chooses it. With `float8` the matrix products of blocks take 8-bit factors,
and everything else is as in bfloat16; only a request asks for it. With `float4` they take 4-bit
ones with a scale for each 16 (NVFP4, arXiv:2509.25149), which other stacks compute on Blackwell."""

OpKind = Literal["matmul", "attention", "memory", "collective"]
"""`memory` is any op bound by memory bandwidth: element-wise, normalisation, look-up, copy.
`collective` is communication between tensor-parallel ranks inside a pass."""

OtherAttention = Literal["math", "cudnn", "efficient"]
"""How attention can be computed other than by the fused kernel that torch prefers. `math`: by
matrix products with a softmax between them, whose probabilities are kept for the backward pass.
`cudnn` and `efficient`: by those fused kernels, on CUDA devices."""

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
"""A collective inside a pass; `all_reduce` takes a sum or a maximum."""

CollectiveAxis = Literal[TensorAxis, "experts", "context"]
"""Which ranks take part in one: tensor-parallel ones, or those that divide the experts."""

_OP_BYTES = ("read_bytes", "written_bytes", "live_bytes")
_LAYER_BYTES = ("saved_bytes", "input_bytes", "output_bytes")

PRECISION_BYTES: dict[Precision, int] = {
    "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8": 2,
    "float4": 2,
}  # fmt: skip
"""Bytes per element of weights and activations."""


def captured_precision(precision: Precision) -> Precision:
    """The precision in which layers are captured for one that is not captured itself.

    TF32 and float64 have the ops of float32, float16 those of bfloat16.
    """
    if precision in ("float64", "tf32"):
        return "float32"
    return "bfloat16" if precision == "float16" else precision


class Polynomial(NamedTuple):
    """The polynomial `constant + s*S + ss*S^2 + B*(b + bs*S + bss*S^2)`.

    B is the micro-batch size in sequences and S the sequence length in tokens.
    """

    constant: float = 0.0
    s: float = 0.0
    ss: float = 0.0
    b: float = 0.0
    bs: float = 0.0
    bss: float = 0.0

    def at(self, micro_batch: float, sequence: int) -> float:
        """The value for a micro-batch of `micro_batch` sequences of `sequence` tokens."""
        fixed = self.constant + sequence * (self.s + sequence * self.ss)
        return fixed + micro_batch * (self.b + sequence * (self.bs + sequence * self.bss))

    def plus(self, *others: "Polynomial") -> Self:
        """The sum with other polynomials."""
        total = self
        for other in others:
            total = type(self)(*map(add, total, other))
        return total

    @property
    def doubled(self) -> Self:
        """Twice the polynomial."""
        return type(self)(*(2 * coefficient for coefficient in self))


class MatmulShape(NamedTuple):
    """A matrix product: `batch` products of (m, k) by (k, n)."""

    batch: Polynomial
    m: Polynomial
    n: Polynomial
    k: Polynomial


class KeptBlocks(NamedTuple):
    """The part of a weight that a product with it uses."""

    block: int
    """Side of a kept block."""
    density: float
    """Kept share of the dense weight."""


class Collective(NamedTuple):
    """The communication of one op with other ranks."""

    kind: CollectiveKind
    nbytes: Polynomial
    """Bytes of the full buffer: the output of an all-gather, or the input of any other."""
    axis: CollectiveAxis = "all"

    @property
    def doubled(self) -> Self:
        """The same collective on elements of twice the size."""
        return self._replace(nbytes=self.nbytes.doubled)


class Op(Document):
    """One ATen operation, or a run of operations that a compiler fuses into one."""

    name: str
    kind: OpKind
    flop: Polynomial = Polynomial()
    read_bytes: Polynomial
    written_bytes: Polynomial
    live_bytes: Polynomial
    """Bytes of this layer that are alive while the op runs, beyond what the caller holds.

    In forward: all that the pass has allocated and not freed, including the layer's output and the
    activations saved for backward. In backward: saved activations that are not yet freed, and all
    that this pass has allocated, including the gradient of the layer's input. The caller holds, and
    counts itself: parameters, the layer's input and, in backward, its output, the gradient of the
    output, and the parameter gradients that the pass makes."""
    shape: MatmulShape | None = None
    """Set for a `matmul` only; of a product with a sparse weight that of the dense one."""
    kept: KeptBlocks | None = None
    """What is kept of a sparse weight; None for a product of dense factors."""
    collective: Collective | None = None
    """Set for a `collective` only."""
    calls: int = 1
    """Number of ATen calls that it stands for; each pays the launch overhead once."""
    precision: Precision | None = None
    """Data type of a matrix product's factors if it is not the layer's."""
    is_causal: bool | None = None
    """False if tokens of an `attention` see later ones too; None means not known, or no attention.
    Its FLOP are those without a mask either way."""
    attention: OtherAttention | None = None
    """How an `attention` is computed; None means by the fused kernel that graphs are captured
    with."""


class LayerCost(Document):
    """The ops and memory of a layer in one precision, run eagerly or compiled."""

    precision: Precision
    compiled: bool
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    recompute: tuple[Op, ...] | None = None
    """What a full recompute repeats; None means the whole forward pass."""
    saved_bytes: Polynomial
    """Activations saved from forward to backward, apart from parameters and the layer's input and
    output."""
    input_bytes: Polynomial
    output_bytes: Polynomial
    sent_bytes: Polynomial | None = None
    """Bytes of the output that a tensor-parallel rank sends to the next stage; None means all.
    Ranks that hold the same output may each send a part of it (Megatron's scatter and gather)."""

    @property
    def message_bytes(self) -> Polynomial:
        """Bytes that a tensor-parallel rank sends to the next stage."""
        return self.output_bytes if self.sent_bytes is None else self.sent_bytes

    def as_float64(self) -> Self:
        """The same cost in float64: every float32 byte count doubled."""

        def doubled(ops: tuple[Op, ...]) -> tuple[Op, ...]:
            return tuple(
                op.model_copy(
                    update={name: getattr(op, name).doubled for name in _OP_BYTES}
                    | {"collective": op.collective and op.collective.doubled}
                )
                for op in ops
            )

        return self.model_copy(
            update={
                "precision": "float64",
                "forward": doubled(self.forward),
                "backward": doubled(self.backward),
                **{name: getattr(self, name).doubled for name in _LAYER_BYTES},
            }
        )
