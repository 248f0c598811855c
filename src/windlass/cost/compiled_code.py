"""Compiled code: what decides it, and how long a run waits for it before its first step."""

from typing import Literal, NamedTuple, Self

from windlass.cost.arrays import Floats
from windlass.cost.clock.plan_columns import LayerConfig, PlanColumns
from windlass.schema import Graph, Machine, OtherAttention, Plan, Precision

KEPT_SHARE = 0.12
"""Share of `compile_seconds` that code takes that an earlier run has left: traced and loaded.

Measured: 3.0 to 4.0 s of processor time in place of 30.7 s, for the three kinds of layers of
`gpt-tiny`, 4 x 128 tokens, torch 2.13, on 2 cores of an AMD EPYC, 2026-11-24, which were shared.
"""


class CompiledCode(NamedTuple):
    """What decides the code of a model's compiled layers, beside the model and the software."""

    tensor: int
    precision: Precision
    loss: Literal["fused"] | None
    attention: OtherAttention | None
    sequence: int
    micro: int

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The code of a plan that compiles."""
        return cls(
            plan.parallel.tensor,
            plan.precision,
            plan.loss,
            plan.attention,
            plan.batch.sequence,
            plan.batch.micro,
        )

    def serves(self, config: LayerConfig) -> bool:
        """Whether layers of a configuration run it, at its own size of micro-batches."""
        mine = (self.tensor, self.precision, self.loss, self.attention)
        return mine == (config.tensor, config.precision, config.loss, config.attention)


KeptCode = frozenset[CompiledCode]
"""Code of one model that earlier runs have left on this machine."""


def compile_seconds(
    plan: Plan, graph: Graph, machine: Machine, kept_code: KeptCode = frozenset()
) -> float:
    """Seconds before the first step in which layers are compiled, one kind after the other."""
    if not plan.compile:
        return 0.0
    share = KEPT_SHARE if CompiledCode.of(plan) in kept_code else 1.0
    return share * layer_kinds_compiled(graph) * machine.device.compile_seconds


def compile_shares(columns: PlanColumns, sequence: int, kept_code: KeptCode) -> Floats:
    """Share of the time of compiling that each plan takes, `[plan]`; zero where it runs eagerly."""
    shares = columns.of_configs([each.compiled for each in columns.configs]).astype(float)
    for code in kept_code:
        if code.sequence == sequence:
            serves = columns.of_configs([code.serves(each) for each in columns.configs])
            shares[(serves > 0) & (shares > 0) & (columns.micro == code.micro)] = KEPT_SHARE
    return shares


def layer_kinds_compiled(graph: Graph) -> int:
    """Number of kinds of layers that a model uses."""
    return len({span.kind for span in graph.layer_runs})
