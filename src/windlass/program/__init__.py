"""Lowers a plan to one instruction list per device, and verifies the lists before they run.

The modules here say which rank does what (device mesh, pipeline schedules, ZeRO sharding, tied
weights, recompute); `lowering` writes the instruction lists, `memory` tracks every tensor's bytes
through them, and `verify` proves that they are complete, free of deadlock and fit in memory.
"""

from windlass.program.activation_checkpointing import (
    describe_recompute, fully_recomputed, is_recomputed, last_phase_begin, recomputable_layers,
    recompute_mode, selective_layers, with_recompute,
)  # fmt: skip
from windlass.program.attention_costs import with_attention
from windlass.program.communication_groups import (
    EXPERT_USES, CollectiveUse, Communicator, DataUse, Partition, PeerMap, communicator_partitions,
    communicator_use,
)  # fmt: skip
from windlass.program.communication_volume import (
    CommunicationVolume, PassCollective, all_gather_bytes, all_reduce_bytes, message_bytes,
    op_collectives, pass_collective, replicated_gradient_sums,
)  # fmt: skip
from windlass.program.device_mesh import (
    MeshCoord, chunks_of_stage, describe_degrees, layers_of_stage, mesh_coord, rank_of,
    stages_by_layer,
)  # fmt: skip
from windlass.program.instruction import (
    BLOCKING_KINDS, GLOBAL_COLLECTIVES, GRADIENT_PASSES, MATCHING_RECEIVE, TRANSFER_KINDS,
    WEIGHT_PASSES, Instruction, InstructionKind, Program,
)  # fmt: skip
from windlass.program.layer_mode_errors import (
    float8_errors, fused_loss_errors, master_weight_errors, moment_errors,
    offloaded_optimizer_errors, selective_recompute_errors, sparse_state_errors, step_graph_errors,
)  # fmt: skip
from windlass.program.lowering.lower import lower, lower_stage, lower_stages
from windlass.program.memory.disk_usage import DiskUsage, disk_usage
from windlass.program.memory.effects import InstructionEffects
from windlass.program.memory.layer_memory import LayerUse, evaluation_bytes, memory_by_layer
from windlass.program.memory.layer_sizes import (
    LayerSizes, StateSizes, layer_kind_state_sizes, plan_layer_sizes, plan_state_sizes,
    sparse_gradient_bytes, updated_elements, weight_gradient_elements,
)  # fmt: skip
from windlass.program.memory.liveness import MemoryProfile, memory_profile
from windlass.program.memory.offloaded_bytes import (
    offloaded_bytes_by_tier, offloaded_layer_bytes, update_state_bytes,
)  # fmt: skip
from windlass.program.memory.stage_tensors import StageTensors
from windlass.program.memory.tier_traffic import TierTraffic, sum_tiers
from windlass.program.memory.values import BOUNCE_BYTES, STAGING_BYTES
from windlass.program.phases import gradients_reuse_weight_space
from windlass.program.pipeline_schedules import PipelinePass, schedule_passes
from windlass.program.replicas.context_parallel import (
    context_errors, context_run_errors, exchanged_bytes, gathered_kinds, micro_of_rank,
)  # fmt: skip
from windlass.program.replicas.expert_parallel import divided_kinds, rank_kinds
from windlass.program.replicas.zero_sharding import (
    expert_sharding, gradient_scatter_group, optimizer_shard_index, padded_elements,
    padded_frozen_elements, parameter_gather_group, parameter_shard_index, updates_per_shard,
)  # fmt: skip
from windlass.program.stack_capabilities import (
    StackNeed, capability_faults, runtime_gaps, unmet_needs,
)  # fmt: skip
from windlass.program.tensor_parallel import LAYER_PASSES, pass_ops
from windlass.program.tied_weights import (
    TiedWeights, tied_across_stages, tied_elements_within_stage, tied_owner_layers,
)  # fmt: skip
from windlass.program.validate_plan import plan_errors, require_valid_plan, tensor_parallel_errors
from windlass.program.verify.verify import verify_programs

__all__ = [
    "BLOCKING_KINDS", "BOUNCE_BYTES", "EXPERT_USES", "GLOBAL_COLLECTIVES", "GRADIENT_PASSES",
    "LAYER_PASSES", "MATCHING_RECEIVE", "STAGING_BYTES", "TRANSFER_KINDS", "WEIGHT_PASSES",
    "CollectiveUse", "CommunicationVolume", "Communicator", "DataUse", "DiskUsage", "Instruction",
    "InstructionEffects", "InstructionKind", "LayerSizes", "LayerUse", "MemoryProfile", "MeshCoord",
    "Partition", "PassCollective", "PeerMap", "PipelinePass", "Program", "StackNeed",
    "StageTensors", "StateSizes", "TiedWeights", "TierTraffic", "all_gather_bytes",
    "all_reduce_bytes", "capability_faults", "chunks_of_stage", "communicator_partitions",
    "communicator_use", "context_errors", "context_run_errors", "describe_degrees",
    "describe_recompute", "disk_usage", "divided_kinds", "evaluation_bytes", "exchanged_bytes",
    "expert_sharding", "float8_errors", "fully_recomputed", "fused_loss_errors", "gathered_kinds",
    "gradient_scatter_group", "gradients_reuse_weight_space", "is_recomputed", "last_phase_begin",
    "layer_kind_state_sizes", "layers_of_stage", "lower", "lower_stage", "lower_stages",
    "master_weight_errors", "memory_by_layer", "memory_profile", "mesh_coord", "message_bytes",
    "micro_of_rank", "moment_errors", "offloaded_bytes_by_tier", "offloaded_layer_bytes",
    "offloaded_optimizer_errors", "op_collectives", "optimizer_shard_index", "padded_elements",
    "padded_frozen_elements", "parameter_gather_group", "parameter_shard_index", "pass_collective",
    "pass_ops", "plan_errors", "plan_layer_sizes", "plan_state_sizes", "rank_kinds", "rank_of",
    "recomputable_layers", "recompute_mode", "replicated_gradient_sums", "require_valid_plan",
    "runtime_gaps", "schedule_passes", "selective_layers", "selective_recompute_errors",
    "sparse_gradient_bytes", "sparse_state_errors", "stages_by_layer", "step_graph_errors",
    "sum_tiers", "tensor_parallel_errors", "tied_across_stages", "tied_elements_within_stage",
    "tied_owner_layers", "unmet_needs", "update_state_bytes", "updated_elements",
    "updates_per_shard", "verify_programs", "weight_gradient_elements", "with_attention",
    "with_recompute",
]  # fmt: skip
