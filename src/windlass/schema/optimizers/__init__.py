"""Optimizers as laws: what each keeps, reads and costs, in one value that every room reads."""

from windlass.schema.optimizers.law import (
    NEWTON_SCHULZ_STEPS,
    DefaultRate,
    OptimizerLaw,
    OptimizerName,
    OtherOptimizer,
    UpdateScope,
    optimizer_law,
)

__all__ = [
    "NEWTON_SCHULZ_STEPS",
    "DefaultRate",
    "OptimizerLaw",
    "OptimizerName",
    "OtherOptimizer",
    "UpdateScope",
    "optimizer_law",
]
