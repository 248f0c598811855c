"""Defines the documents that all other packages exchange, as immutable data without behaviour.

They are the model graph, the machine, the request, the plan, its prediction, and the records of
runs, comparisons and verifications.
"""

from windlass.schema.answers.comparison import MachineForecast, SmallestMachine
from windlass.schema.answers.dataflow import (
    ChipRates, DataflowReport, FlowEdge, FlowOp, FlowPass, FlowRole, FlowSection, FusedPass,
    FusionLevel, PassFlow, SparsityLevel,
)  # fmt: skip
from windlass.schema.answers.doctor_report import (
    CheckGroup, CheckStatus, DoctorCheck, DoctorReport, DoctorSystem, RingRate,
)  # fmt: skip
from windlass.schema.answers.largest_model import (
    LargestModelRun, PredictedMeasured, ReferenceCheck, ReferenceComparison,
)  # fmt: skip
from windlass.schema.answers.measurement import Measurement
from windlass.schema.answers.task_score import TaskMetric, TaskScore
from windlass.schema.answers.verification import (
    MOMENT_TOLERANCE, TOLERANCE, ComparedQuantity, Mismatch, QuantityComparison, VerificationResult,
)  # fmt: skip
from windlass.schema.attention_tiling import attention_tiles
from windlass.schema.data_request import BYTE_ENTRIES, SENTENCES_PER_ROW, DataRequest, DataSize
from windlass.schema.example_shape import ExampleShape
from windlass.schema.fact_table import fact_table_html
from windlass.schema.graph import (
    PRECISION_BYTES, Collective, CollectiveAxis, CollectiveKind, GradientReach, Graph, KeptBlocks,
    LayerCost, LayerKind, LayerRun, MatmulShape, Op, OpKind, OtherAttention, ParameterInfo,
    Polynomial, Precision, captured_precision,
)  # fmt: skip
from windlass.schema.machine import (
    CACHED_BYTES, HEAD_PARTS, MAX_CONTENTION, OWN_STACK, TYPICAL_HEAD_WIDTH, AttentionKernel,
    AttentionRate, Capabilities, ChosenDefault, Curve, Device, Fusion, Link, Machine, MachinePart,
    MatmulRate, MomentRate, OpRate, Point, ProductRate, ProductRole, Source, SparseProductRate,
    Stack, StackMemory, Tier, TileRate, source_of,
)  # fmt: skip
from windlass.schema.model_request import (
    HUGGING_FACE_PREFIX, MAX_LAYERS, MAX_SIZE, LoraRequest, ModelRequest, is_users_own,
)  # fmt: skip
from windlass.schema.optimizers import (
    NEWTON_SCHULZ_STEPS, OptimizerLaw, OptimizerName, OtherOptimizer, optimizer_law,
)  # fmt: skip
from windlass.schema.plan import (
    CONTEXT_RUNS, DEVICE_TIER, HOST_TIER, MOMENT_BLOCK, VOCABULARY_MULTIPLE, AttentionBackend,
    Batch, MomentFormat, Offload, OffloadClass, Parallelism, PipelineSchedule, Plan, Recompute,
    ShardingDegrees, Stage,
)  # fmt: skip
from windlass.schema.prediction import (
    DEVIATIONS_OF_80_PERCENT, DeviceTimeline, MemoryClass, OffloadTraffic, Prediction,
    SparseSpeedup, TierPeak, Timeline,
)  # fmt: skip
from windlass.schema.request import (
    BatchRequest, OffloadRequest, ParallelRequest, Request, ResolvedRequest, ShardingRequest,
    meant_sizes,
)  # fmt: skip
from windlass.schema.run_record import (
    ATTEMPTS_FOLDER, CHAT_TEMPLATE_FILE, CHECKPOINT_FOLDER, CODE_FILE, CONFIG_FILE,
    CONVERTED_CHECKPOINT_FOLDER, DATA_FILE, ENVIRONMENT_FILE, EVALUATIONS_FOLDER, EXAMPLES_FILE,
    GENERATION_CONFIG_FILE, GRAPH_FILE, JOBSET_FILE, JOURNAL_FOLDER, LARGEST_MODEL_FILE,
    LAUNCH_FILE, LAUNCH_SECRET_FILE, MACHINE_FILE, MEASURED_TIMELINE_FILE, MERGED_CHECKPOINT_FOLDER,
    MODEL_CONFIG_FILE, PLAN_FILE, PREDICTED_TIMELINE_FILE, PREDICTION_FILE, PROGRAM_FILE, RAY_FILE,
    REPORT_FILE, REQUEST_FILE, SAMPLE_FILE, SLURM_FILE, SPECIAL_TOKENS_FILE, STATE_FOLDER,
    TASKS_FOLDER, TOKENIZER_FILE, TOKENS_FOLDER, TRAINJOB_FILE, CodeSnapshot, CodeTree,
    ConfigScalar, ConfigValue, DataManifest, DataSplit, Environment, InputName, OmittedFile,
    RunConfig, RunState, Step, UntrackedFile,
)  # fmt: skip
from windlass.schema.sparsity import BLOCK_SIZES, ModelIdentity, SparsityRequest
from windlass.schema.tensor_grid import (
    TensorAxis, TensorGrid, grid_columns, grid_rows, group_size, group_span, tensor_degree,
)  # fmt: skip
from windlass.schema.train_request import ParameterGroup, TrainRequest, TrainSettings

__all__ = [
    "ATTEMPTS_FOLDER", "BLOCK_SIZES", "BYTE_ENTRIES", "CACHED_BYTES", "CHAT_TEMPLATE_FILE",
    "CHECKPOINT_FOLDER", "CODE_FILE", "CONFIG_FILE", "CONTEXT_RUNS", "CONVERTED_CHECKPOINT_FOLDER",
    "DATA_FILE", "DEVIATIONS_OF_80_PERCENT", "DEVICE_TIER", "ENVIRONMENT_FILE",
    "EVALUATIONS_FOLDER", "EXAMPLES_FILE", "GENERATION_CONFIG_FILE", "GRAPH_FILE", "HEAD_PARTS",
    "HOST_TIER", "HUGGING_FACE_PREFIX", "JOBSET_FILE", "JOURNAL_FOLDER", "LARGEST_MODEL_FILE",
    "LAUNCH_FILE", "LAUNCH_SECRET_FILE", "MACHINE_FILE", "MAX_CONTENTION", "MAX_LAYERS", "MAX_SIZE",
    "MEASURED_TIMELINE_FILE", "MERGED_CHECKPOINT_FOLDER", "MODEL_CONFIG_FILE", "MOMENT_BLOCK",
    "MOMENT_TOLERANCE", "NEWTON_SCHULZ_STEPS", "OWN_STACK", "PLAN_FILE", "PRECISION_BYTES",
    "PREDICTED_TIMELINE_FILE", "PREDICTION_FILE", "PROGRAM_FILE", "RAY_FILE", "REPORT_FILE",
    "REQUEST_FILE", "SAMPLE_FILE", "SENTENCES_PER_ROW", "SLURM_FILE", "SPECIAL_TOKENS_FILE",
    "STATE_FOLDER", "TASKS_FOLDER", "TOKENIZER_FILE", "TOKENS_FOLDER", "TOLERANCE", "TRAINJOB_FILE",
    "TYPICAL_HEAD_WIDTH", "VOCABULARY_MULTIPLE", "AttentionBackend", "AttentionKernel",
    "AttentionRate", "Batch", "BatchRequest", "Capabilities", "CheckGroup", "CheckStatus",
    "ChipRates", "ChosenDefault", "CodeSnapshot", "CodeTree", "Collective", "CollectiveAxis",
    "CollectiveKind", "ComparedQuantity", "ConfigScalar", "ConfigValue", "Curve", "DataManifest",
    "DataRequest", "DataSize", "DataSplit", "DataflowReport", "Device", "DeviceTimeline",
    "DoctorCheck", "DoctorReport", "DoctorSystem", "Environment", "ExampleShape", "FlowEdge",
    "FlowOp", "FlowPass", "FlowRole", "FlowSection", "FusedPass", "Fusion", "FusionLevel",
    "GradientReach", "Graph", "InputName", "KeptBlocks", "LargestModelRun", "LayerCost",
    "LayerKind", "LayerRun", "Link", "LoraRequest", "Machine", "MachineForecast", "MachinePart",
    "MatmulRate", "MatmulShape", "Measurement", "MemoryClass", "Mismatch", "ModelIdentity",
    "ModelRequest", "MomentFormat", "MomentRate", "Offload", "OffloadClass", "OffloadRequest",
    "OffloadTraffic", "OmittedFile", "Op", "OpKind", "OpRate", "OptimizerLaw", "OptimizerName",
    "OtherAttention", "OtherOptimizer", "ParallelRequest", "Parallelism", "ParameterGroup",
    "ParameterInfo", "PassFlow", "PipelineSchedule", "Plan", "Point", "Polynomial", "Precision",
    "PredictedMeasured", "Prediction", "ProductRate", "ProductRole", "QuantityComparison",
    "Recompute", "ReferenceCheck", "ReferenceComparison", "Request", "ResolvedRequest", "RingRate",
    "RunConfig", "RunState", "ShardingDegrees", "ShardingRequest", "SmallestMachine", "Source",
    "SparseProductRate", "SparseSpeedup", "SparsityLevel", "SparsityRequest", "Stack",
    "StackMemory", "Stage", "Step", "TaskMetric", "TaskScore", "TensorAxis", "TensorGrid", "Tier",
    "TierPeak", "TileRate", "Timeline", "TrainRequest", "TrainSettings", "UntrackedFile",
    "VerificationResult", "attention_tiles", "captured_precision", "fact_table_html",
    "grid_columns", "grid_rows", "group_size", "group_span", "is_users_own", "meant_sizes",
    "optimizer_law", "source_of", "tensor_degree",
]  # fmt: skip
