from .arrays import Bools, Floats, Ints
from .clock.array_clock import ArrayClock
from .clock.plan_columns import LayerConfig, PipelineShape, PlanColumns
from .clock.stack_bytes import stack_stage_bytes
from .clock.stage_moments import waiting_microbatches
from .compiled_code import (
    CompiledCode, KeptCode, compile_seconds, compile_shares, layer_kinds_compiled,
)  # fmt: skip
from .dataflow.dataflow_report import DataflowSubject, dataflow_report
from .instruction_time import InstructionCosts, KnownCosts
from .op_time import head_width
from .peak_memory import MEMORY_ERROR, stage_programs, stage_tier_peaks
from .predict import predict_plan, predict_time, simulated_seconds
from .ring_bandwidth import ring_cost
from .simulator.event_simulator import simulate
from .simulator.offload_queue import first_step_cost

__all__ = [
    "MEMORY_ERROR", "ArrayClock", "Bools", "CompiledCode", "DataflowSubject", "Floats",
    "InstructionCosts", "Ints", "KeptCode", "KnownCosts", "LayerConfig", "PipelineShape",
    "PlanColumns", "compile_seconds", "compile_shares", "dataflow_report", "first_step_cost",
    "head_width", "layer_kinds_compiled", "predict_plan", "predict_time", "ring_cost", "simulate",
    "simulated_seconds", "stack_stage_bytes", "stage_programs", "stage_tier_peaks",
    "waiting_microbatches",
]  # fmt: skip
