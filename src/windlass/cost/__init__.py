"""Cost models: predicted time of operations, collectives and whole steps, and peak memory.

`predict` gives the time and memory of one plan. `simulator` plays the programs of a plan
instruction by instruction. `clock` walks the schedule of many plans at once as arrays, for the
planner and for published runs.
"""

from windlass.cost.arrays import (
    Bools,
    Floats,
    Ints,
)
from windlass.cost.clock.array_clock import (
    ArrayClock,
)
from windlass.cost.clock.plan_columns import (
    LayerConfig,
    PipelineShape,
    PlanColumns,
)
from windlass.cost.clock.stack_bytes import stack_stage_bytes
from windlass.cost.instruction_time import (
    InstructionCosts,
)
from windlass.cost.peak_memory import (
    MEMORY_ERROR,
    stage_programs,
    stage_tier_peaks,
)
from windlass.cost.predict import (
    predict_plan,
    predict_time,
)
from windlass.cost.ring_bandwidth import (
    ring_cost,
)
from windlass.cost.simulator.offload_queue import (
    first_step_cost,
)
from windlass.cost.simulator.timeline import (
    simulate,
)

__all__ = [
    "MEMORY_ERROR",
    "ArrayClock",
    "Bools",
    "Floats",
    "InstructionCosts",
    "Ints",
    "LayerConfig",
    "PipelineShape",
    "PlanColumns",
    "first_step_cost",
    "predict_plan",
    "predict_time",
    "ring_cost",
    "simulate",
    "stack_stage_bytes",
    "stage_programs",
    "stage_tier_peaks",
]
