from .arrays import (
    Bools,
    Floats,
    Ints,
)
from .clock.array_clock import (
    ArrayClock,
)
from .clock.plan_columns import (
    LayerConfig,
    PipelineShape,
    PlanColumns,
)
from .clock.stack_bytes import (
    stack_stage_bytes,
)
from .dataflow.dataflow_report import (
    DataflowSubject,
    chip_rates,
    dataflow_report,
)
from .instruction_time import (
    InstructionCosts,
)
from .peak_memory import (
    MEMORY_ERROR,
    stage_programs,
    stage_tier_peaks,
)
from .predict import (
    predict_plan,
    predict_time,
)
from .ring_bandwidth import (
    ring_cost,
)
from .simulator.event_simulator import (
    simulate,
)
from .simulator.offload_queue import (
    first_step_cost,
)

__all__ = [
    "MEMORY_ERROR",
    "ArrayClock",
    "Bools",
    "DataflowSubject",
    "Floats",
    "InstructionCosts",
    "Ints",
    "LayerConfig",
    "PipelineShape",
    "PlanColumns",
    "chip_rates",
    "dataflow_report",
    "first_step_cost",
    "predict_plan",
    "predict_time",
    "ring_cost",
    "simulate",
    "stack_stage_bytes",
    "stage_programs",
    "stage_tier_peaks",
]
