"""Graph of an image model as one layer, from its published FLOP, activations and parameters.

It serves data-parallel runs, whose devices all compute the whole model. Source of the counts:
Radosavovic et al. 2020, arXiv:2003.13678, which names FLOP, activations and parameters of models.
"""

from dataclasses import dataclass

from windlass.schema import Graph, LayerCost, LayerKind, LayerRun, Op, ParameterInfo, Polynomial

_FORWARD_BYTES = 8
"""Bytes of 16-bit traffic for each output of a convolution outside of products: normalization reads
it for its statistics and again to write the result, and residual sums read another."""
_BACKWARD_BYTES = 14
"""The same backward: the gradients of normalization read both numbers twice and write one, those of
sums and ReLU read two and write one."""
_KERNELS = 3
"""Kernels for each convolution: itself, statistics, and normalization with ReLU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel:
    """The numbers of an image model that decide its cost."""

    name: str
    flop: float
    """FLOP of one image's forward pass, 2 for a multiply-add."""
    activations: float
    """Numbers that all convolutions give for one image."""
    parameters: int
    convolutions: int


def image_graph(model: ImageModel) -> Graph:
    """The graph of an image model; an image is a sequence of one token."""
    cost = LayerCost(
        precision="bfloat16",
        compiled=False,
        forward=_ops(model, passes=1, number_bytes=_FORWARD_BYTES),
        backward=_ops(model, passes=2, number_bytes=_BACKWARD_BYTES),
        saved_bytes=Polynomial(b=2 * 2 * model.activations),
        input_bytes=Polynomial(),
        output_bytes=Polynomial(constant=4),
    )
    kind = LayerKind(
        name="images",
        parameters=(ParameterInfo(name="weights", shape=(model.parameters,)),),
        costs=(cost,),
    )
    return Graph(
        name=model.name,
        vocabulary=1,
        layer_runs=(LayerRun(kind="images", count=1),),
        kinds={"images": kind},
    )


def _ops(model: ImageModel, *, passes: int, number_bytes: int) -> tuple[Op, ...]:
    """Convolutions of a pass that computes `passes` times a forward pass's, and the rest of it."""
    alive = Polynomial(b=2 * 2 * model.activations)
    kernels = passes * model.convolutions
    return (
        Op(
            name="convolutions",
            kind="matmul",
            flop=Polynomial(b=passes * model.flop),
            read_bytes=Polynomial(),
            written_bytes=Polynomial(),
            live_bytes=alive,
            calls=kernels,
        ),
        Op(
            name="normalizations",
            kind="memory",
            read_bytes=Polynomial(b=number_bytes * model.activations),
            written_bytes=Polynomial(),
            live_bytes=alive,
            calls=(_KERNELS - 1) * kernels,
        ),
    )
