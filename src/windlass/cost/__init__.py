"""Cost models: predicted time of operations, collectives and whole steps, and peak memory.

`predict` gives the time and memory of one plan. `simulator` plays the programs of a plan
instruction by instruction. `batched` evaluates many plans at once from closed formulas, for the
planner.
"""

from windlass.cost.arrays import (
    Bools,
    Floats,
    Ints,
)
from windlass.cost.batched.config_keys import (
    LayerConfig,
    RecomputeConfig,
    ShardingOption,
    ShardingOptions,
)
from windlass.cost.batched.evaluate_batch import (
    PlanTotals,
    evaluate_batch,
    stage_bytes,
    stage_seconds,
    step_seconds,
)
from windlass.cost.batched.layer_cost import (
    LayerCosts,
)
from windlass.cost.batched.lower_bound import (
    MemoryLimit,
    min_batch_seconds,
    min_batch_seconds_in_memory,
)
from windlass.cost.batched.plan_table import (
    LayerConfigTable,
    PlanTable,
)
from windlass.cost.batched.sharding_table import (
    ShardingTable,
)
from windlass.cost.clock.array_clock import (
    ArrayClock,
)
from windlass.cost.clock.plan_columns import (
    LayerConfig as ClockConfig,
    PipelineShape,
    PlanColumns,
)
from windlass.cost.instruction_time import (
    InstructionCosts,
)
from windlass.cost.peak_memory import (
    stage_tier_peaks,
    tier_peaks,
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
    "ArrayClock",
    "Bools",
    "ClockConfig",
    "Floats",
    "InstructionCosts",
    "Ints",
    "LayerConfig",
    "LayerConfigTable",
    "LayerCosts",
    "MemoryLimit",
    "PipelineShape",
    "PlanColumns",
    "PlanTable",
    "PlanTotals",
    "RecomputeConfig",
    "ShardingOption",
    "ShardingOptions",
    "ShardingTable",
    "evaluate_batch",
    "first_step_cost",
    "min_batch_seconds",
    "min_batch_seconds_in_memory",
    "predict_plan",
    "predict_time",
    "ring_cost",
    "simulate",
    "stage_bytes",
    "stage_seconds",
    "stage_tier_peaks",
    "step_seconds",
    "tier_peaks",
]
