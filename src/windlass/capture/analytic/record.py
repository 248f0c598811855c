"""Runs a layer forward and backward on symbolic sizes and gives its trace."""

from windlass.capture.analytic.autograd import Checkpoint, leaf
from windlass.capture.analytic.collectives import Rank
from windlass.capture.analytic.engine import gradients
from windlass.capture.analytic.modules import Scope, mean_cross_entropy
from windlass.capture.analytic.symbols import MICRO_BATCH, SEQUENCE, polynomial
from windlass.capture.analytic.tensor import Tape, Tensor
from windlass.capture.analytic.transformer import LayerType
from windlass.capture.trace import FittedTrace
from windlass.models import TransformerConfig
from windlass.schema import Polynomial, Precision


def layer_scope(config: TransformerConfig, rank: Rank, precision: Precision) -> Scope:
    """A scope for the modules of one layer.

    Args:
        config: the model.
        rank: the first tensor-parallel rank.
        precision: float32 or bfloat16.
    """
    return Scope(
        tape=Tape(),
        config=config,
        rank=rank,
        dtype="bfloat16" if precision == "bfloat16" else "float32",
        parameters=[],
        rules=[],
        feature_paths=[],
    )


def record_layer(
    config: TransformerConfig,
    layer: LayerType,
    rank: Rank,
    precision: Precision,
    *,
    selective: bool = False,
) -> FittedTrace:
    """The trace of a layer's forward and backward pass.

    Args:
        config: the model.
        layer: which of its layers.
        rank: the first tensor-parallel rank.
        precision: float32 or bfloat16.
        selective: whether it runs with selective activation checkpointing.
    """
    scope = layer_scope(config, rank, precision)
    run, tape = layer.build(scope), scope.tape
    trace, weights = tape.trace, [tensor for _, tensor in scope.parameters]
    tokens = (MICRO_BATCH, SEQUENCE * rank.rows)
    if layer.place == "first":
        x = Tensor(tape, tokens, "int64")
    else:
        x = leaf(Tensor(tape, (MICRO_BATCH, SEQUENCE, config.width // rank.columns), scope.dtype))
    targets = [Tensor(tape, tokens, "int64")] if layer.place == "last" else []
    trace.set_role([weight.buffer for weight in weights], "parameter")
    trace.set_role([tensor.buffer for tensor in (x, *targets)], "input")
    y = Checkpoint(tape, lambda: run(x)).forward() if selective else run(x)
    for target in targets:
        y = mean_cross_entropy(y, target, rank)
    trace.end_forward([y.buffer])
    tape.records_gradients = False
    output_gradient = Tensor(tape, y.shape, y.dtype)
    trace.set_role([output_gradient.buffer], "output_gradient")
    inputs = [x] if x.node else []
    found = gradients(y, output_gradient, [*inputs, *weights])
    of_weights = found[len(inputs) :]
    trace.set_role([gradient.buffer for gradient in of_weights], "parameter_gradient")
    finished = trace.finish(input_bytes=x.touched_bytes, output_bytes=y.touched_bytes)
    # Most sizes occur many times.
    polynomials: dict[int, Polynomial] = {}
    for number in trace.numbers:
        if number not in polynomials:
            polynomials[number] = polynomial(number, rank.rows)
    return FittedTrace(trace=finished, numbers=tuple(map(polynomials.__getitem__, trace.numbers)))
