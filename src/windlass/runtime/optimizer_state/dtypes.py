"""The dtypes of a run's weights, gradients and optimizer state, by its precision."""

import torch

from windlass.schema import Plan, Precision

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16, "float8": torch.bfloat16,
    "float64": torch.float64,
}  # fmt: skip


def grad_accum_dtype(plan: Plan) -> torch.dtype:
    """The dtype in which gradients of a step's micro-batches are accumulated."""
    working = DTYPES[plan.precision]
    return wide_dtype(working) if plan.batch.accumulation > 1 else working


def master_dtype(precision: Precision) -> torch.dtype:
    """The dtype of master weights, accumulated gradients and unquantized moments."""
    return wide_dtype(DTYPES[precision])


def stored_dtype(plan: Plan) -> torch.dtype:
    """The dtype in which a plan keeps weights between updates."""
    keeps_masters = plan.master_weights is None
    return master_dtype(plan.precision) if keeps_masters else DTYPES[plan.precision]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of another one are summed: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32
