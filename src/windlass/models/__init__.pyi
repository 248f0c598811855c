from .adapter_files.base_places import base_format, base_places
from .adapter_files.peft_adapter import (
    PeftAdapter, fitting_adapters, linear_layers, own_targets, peft_adapter, saved_classes,
)  # fmt: skip
from .adapter_files.peft_model import peft_config
from .attention import Attention, attend, chooses_attention, set_attention_backend, sliding_window
from .build import build_layer_stack, layer_stack_of, pretrained_classes
from .catalog import (
    ModelArgument, apply_model_arguments, apply_resnet_arguments, has_config, is_causal,
    is_residual, model_config, model_names, predicts_pairs, predicts_text_classes,
    published_active_parameters, published_parameter_count, resnet_config,
    runs_by_transformers, takes_images, text_model_names,
)  # fmt: skip
from .check_shardable import sharding_errors
from .config import ExpertConfig, LatentAttention, TransformerConfig
from .context_parallel import ContextParallelRank, count_in_runs
from .context_parallel_layers import can_divide_sequences, divide_sequence
from .experts.arguments import refuse_sparse_experts
from .experts.exchange import ExpertParallelRank, divide_experts, exchanges_rows, expert_parameters
from .experts.mixture import MixtureOfExperts
from .experts.routing import Router, balance_buffers, set_balance_scale
from .fine_tuning.adapter_names import is_adapter
from .fine_tuning.lora import Adapted, LoraLinear
from .float8.linears import use_float8
from .fused_loss.projection import can_fuse_loss, fuse_loss, pad_vocabulary, padded_linear
from .fused_loss.sizes import FusedLossSizes
from .huggingface.export_layout import ExportLayout, export_layout
from .huggingface.gguf_layout import GgufLayout, gguf_layout
from .huggingface.gguf_vocabulary import GgufVocabulary, gguf_vocabulary
from .huggingface.image_processor import PROCESSOR_FILE, class_names, image_processor
from .huggingface.model_folder import (
    find_model_folder, is_huggingface, is_peft_folder, is_pretrained, tokenizer_file,
)  # fmt: skip
from .huggingface.weight_places import PLACES_SUFFIX, WeightPlace, WeightPlaces
from .huggingface.read_config import keys_of_transformers
from .huggingface.write_config import config_content
from .images.image_config import ResNetConfig
from .init_weights import meta_copy
from .inspection.layer_kinds import is_embedding_only, norm_statistics, running_statistics
from .inspection.shape_inference import fake_state
from .layer_stack import LayerStack, layer_sharding, layer_that_looks_ahead, materialize_layer
from .loss import IGNORE_INDEX, in_loss_precision, layer_loss, mean_cross_entropy, set_layer_loss
from .positions.documents import document_buffers
from .selective_checkpoint import checkpoint_selectively
from .sentences import (
    HEAD_RESULTS, HeadLosses, HeadOutputs, gives_text_classes, has_sentence_head, token_output,
    token_targets,
)  # fmt: skip
from .sparsity.sparse_layers import joined_matrices
from .tensor_parallel.collectives import TensorParallelRank, all_gather, reduce_scatter
from .tensor_parallel.parallel_modules import SampleShard, ShardedDropout, TensorParallelLoss
from .tensor_parallel.shard_module import shard_layer
from .tensor_parallel.shard_params import EqualShard, ParamShard, param_shards
from .tensor_parallel.sharding_rules import BlockLayout, ShardingRule, block_shard_error
from .transformer import can_cache_tokens, set_first_positions
from .transformers_models.export_model import TransformersLayout, transformers_layout

__all__ = [
    "HEAD_RESULTS", "IGNORE_INDEX", "PLACES_SUFFIX", "PROCESSOR_FILE", "Adapted", "Attention",
    "BlockLayout", "ContextParallelRank", "EqualShard", "ExpertConfig", "ExpertParallelRank",
    "ExportLayout", "FusedLossSizes", "GgufLayout", "GgufVocabulary", "HeadLosses", "HeadOutputs",
    "LatentAttention", "LayerStack", "LoraLinear", "MixtureOfExperts", "ModelArgument",
    "ParamShard", "PeftAdapter", "ResNetConfig", "Router", "SampleShard", "ShardedDropout",
    "ShardingRule", "TensorParallelLoss", "TensorParallelRank", "TransformerConfig",
    "TransformersLayout", "WeightPlace", "WeightPlaces", "all_gather", "apply_model_arguments",
    "apply_resnet_arguments", "attend", "balance_buffers", "base_format", "base_places",
    "block_shard_error", "build_layer_stack", "can_cache_tokens", "can_divide_sequences",
    "can_fuse_loss", "checkpoint_selectively", "chooses_attention", "class_names", "config_content",
    "count_in_runs", "divide_experts", "divide_sequence", "document_buffers", "exchanges_rows",
    "expert_parameters", "export_layout", "fake_state", "find_model_folder", "fitting_adapters",
    "fuse_loss", "gguf_layout", "gguf_vocabulary", "gives_text_classes", "has_config",
    "has_sentence_head", "image_processor", "in_loss_precision", "is_adapter", "is_causal",
    "is_embedding_only", "is_huggingface", "is_peft_folder", "is_pretrained", "is_residual",
    "joined_matrices", "keys_of_transformers", "layer_loss", "layer_sharding", "layer_stack_of",
    "layer_that_looks_ahead", "linear_layers", "materialize_layer", "mean_cross_entropy",
    "meta_copy", "model_config", "model_names", "norm_statistics", "own_targets", "pad_vocabulary",
    "padded_linear", "param_shards", "peft_adapter", "peft_config", "predicts_pairs",
    "predicts_text_classes", "pretrained_classes", "published_active_parameters",
    "published_parameter_count", "reduce_scatter", "refuse_sparse_experts", "resnet_config",
    "running_statistics", "runs_by_transformers", "saved_classes", "set_attention_backend",
    "set_balance_scale", "set_first_positions", "set_layer_loss", "shard_layer", "sharding_errors",
    "sliding_window", "takes_images", "text_model_names", "token_output", "token_targets",
    "tokenizer_file", "transformers_layout", "use_float8",
]  # fmt: skip
