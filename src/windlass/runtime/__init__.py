"""Executes a plan exactly: interpreter, parameters, optimizer, stores and checkpoints.

It never searches for plans or predicts their cost.
"""

from windlass.runtime.checkpoint.run_checkpoints import RunCheckpoints, evaluation_checkpoint
from windlass.runtime.checkpoint.checkpoint import (
    Checkpoint, Manifest, checkpoint_folders, checkpoint_name, hold_checkpoint, is_sharded,
    latest_checkpoint, layer_file, link_checkpoint, open_checkpoint, part_file, part_files,
    remove_temporaries, verify_checkpoint,
)  # fmt: skip
from windlass.runtime.checkpoint.convert_moments import read_moments
from windlass.runtime.checkpoint.export_gguf import export_gguf
from windlass.runtime.checkpoint.export_huggingface import (
    export_adapter, export_huggingface, require_new_folder,
)  # fmt: skip
from windlass.runtime.checkpoint.export_weights import (
    export_masks, export_weights, load_dense_weights,
)  # fmt: skip
from windlass.runtime.checkpoint.load_state import import_weights, load_weights, read_weight
from windlass.runtime.checkpoint.layer_tensors import read_tensors
from windlass.runtime.checkpoint.merge_shards import merge_shards, open_parts
from windlass.runtime.checkpoint.safetensors_io import SavedFile, TensorPart
from windlass.runtime.distributed.heartbeat import CompileHeartbeat, HeartbeatWriter
from windlass.runtime.distributed.local_launcher import LocalLauncher, WatchdogTimeouts
from windlass.runtime.distributed.p2p import batch_on_meta, output_shapes
from windlass.runtime.distributed.process_groups import OneOfRanks
from windlass.runtime.distributed.rank_ipc import (
    RANKS_FOLDER, ParentProcess, flight_record_file, heartbeat_file, write_report,
)  # fmt: skip
from windlass.runtime.distributed.rank_placement import RankPlacement, rank_placements
from windlass.runtime.distributed.rendezvous import (
    HeadAddress, Rendezvous, RunStart, StoreAddress, broadcast_start, connect_watchdog_store,
    create_store_file, destroy_process_group, host_store, init_process_group, is_peer_lost,
)  # fmt: skip
from windlass.runtime.distributed.status_store import StatusStore
from windlass.runtime.distributed.watchdog import HostWatchdog
from windlass.runtime.engine import StartEngine, TimelineRecorder
from windlass.runtime.expert_load import ExpertLoad
from windlass.runtime.inference.held_out_loss import Evaluations
from windlass.runtime.inference.generate import SamplingOptions, generate_text
from windlass.runtime.inference.inference_model import InferenceModel
from windlass.runtime.inference.rank_passes import RankPasses
from windlass.runtime.inference.score_tasks import log_likelihoods, score_on_rank
from windlass.runtime.interpreter import OTHER_WORK_SLOT, Handlers, HeartbeatSlots
from windlass.runtime.keyed_dropout import DropoutKeys, generator_seed, layer_key
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.memory_stats import MemoryLimit
from windlass.runtime.offload.transfer_queue import TransferStats
from windlass.runtime.optimizer_state.optimizer_state import DTYPES, master_dtype
from windlass.runtime.optimizers.learning_rate import (
    learning_rate, rate_and_decay, require_group_matches,
)  # fmt: skip
from windlass.runtime.optimizers.step_numbers import StepNumbers
from windlass.runtime.param_store import write_checkpoint_file
from windlass.runtime.parameters import (
    NOT_LOADED, LayerParameters, ModelParameter, persistent_buffers,
)  # fmt: skip
from windlass.runtime.rank_context import LogLikelihoods, RankContext
from windlass.runtime.rank_parts import RankParts, rank_templates, whole_templates
from windlass.runtime.sparsity.convert_layers import convert_checkpoint
from windlass.runtime.step.step_inputs import StepInputs
from windlass.runtime.step.step_state import LossScale, StepState
from windlass.runtime.step_outcome import BrokenStep, reduce_outcome
from windlass.runtime.train import train_loop
from windlass.runtime.verify.activation_fingerprints import ActivationFingerprints
from windlass.runtime.verify.compare_runs import InstrumentedRun, compare_to_single_device
from windlass.runtime.verify.compare_to_plain import compare_to_plain_pytorch
from windlass.runtime.verify.compare_to_reference import compare_to_reference
from windlass.runtime.verify.fault_injection import (
    FAULTS, OVERFLOWING_STEPS, faulty_layer, inject_fault, overflow_on_last_rank,
)  # fmt: skip
from windlass.runtime.verify.handler_hooks import HandlerWrapper, HookContext
from windlass.runtime.verify.reference_model import reference_step
from windlass.runtime.verify.restart import train_with_restart

__all__ = [
    "DTYPES", "FAULTS", "NOT_LOADED", "OTHER_WORK_SLOT", "OVERFLOWING_STEPS", "RANKS_FOLDER",
    "ActivationFingerprints", "BrokenStep", "Checkpoint", "CompileHeartbeat", "DropoutKeys",
    "Evaluations", "ExpertLoad", "HandlerWrapper", "Handlers", "HeadAddress", "HeartbeatSlots",
    "HeartbeatWriter", "HookContext", "HostWatchdog", "InferenceModel", "InstrumentedRun",
    "LayerParameters", "LayerTemplate", "LocalLauncher", "LogLikelihoods", "LossScale", "Manifest",
    "MemoryLimit", "ModelParameter", "OneOfRanks", "ParentProcess", "RankContext", "RankParts",
    "RankPasses", "RankPlacement", "Rendezvous", "RunCheckpoints", "RunStart", "SamplingOptions",
    "SavedFile", "StartEngine", "StatusStore", "StepInputs", "StepNumbers", "StepState",
    "StoreAddress", "TensorPart", "TimelineRecorder", "TransferStats", "WatchdogTimeouts",
    "batch_on_meta", "broadcast_start", "checkpoint_folders", "checkpoint_name",
    "compare_to_plain_pytorch", "compare_to_reference", "compare_to_single_device",
    "connect_watchdog_store", "convert_checkpoint", "create_store_file", "destroy_process_group",
    "evaluation_checkpoint", "export_adapter", "export_gguf", "export_huggingface", "export_masks",
    "export_weights", "faulty_layer", "flight_record_file", "generate_text", "generator_seed",
    "heartbeat_file", "hold_checkpoint", "host_store", "import_weights", "init_process_group",
    "inject_fault", "is_peer_lost", "is_sharded", "latest_checkpoint", "layer_file", "layer_key",
    "learning_rate", "link_checkpoint", "load_dense_weights", "load_weights", "log_likelihoods",
    "master_dtype", "merge_shards", "open_checkpoint", "open_parts", "output_shapes",
    "overflow_on_last_rank", "part_file", "part_files", "persistent_buffers", "rank_placements",
    "rank_templates", "rate_and_decay", "read_moments", "read_tensors", "read_weight",
    "reduce_outcome", "reference_step", "remove_temporaries", "require_group_matches",
    "require_new_folder", "score_on_rank", "train_loop", "train_with_restart", "verify_checkpoint",
    "whole_templates", "write_checkpoint_file", "write_report",
]  # fmt: skip
