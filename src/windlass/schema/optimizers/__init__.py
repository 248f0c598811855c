"""Optimizers as laws: what each keeps, reads and costs, in one value that every room reads."""

from windlass.schema.optimizers.law import (
    NEWTON_SCHULZ_STEPS, DefaultRate, LearningRateSchedule, OptimizerLaw, OptimizerName,
    OtherOptimizer, UpdateScope, averaging_faults, optimizer_law, optimizer_settings,
    unread_settings,
)  # fmt: skip

__all__ = [
    "NEWTON_SCHULZ_STEPS", "DefaultRate", "LearningRateSchedule", "OptimizerLaw", "OptimizerName",
    "OtherOptimizer", "UpdateScope", "averaging_faults", "optimizer_law", "optimizer_settings",
    "unread_settings",
]  # fmt: skip
