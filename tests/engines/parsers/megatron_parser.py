"""Makes Megatron-Core's configuration objects of files of flags, in its environment."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

OF_THE_SCRIPT = {
    "transformer-impl", "mock-data", "tokenizer-type", "log-interval", "log-throughput",
    "eval-iters", "num-query-groups", "group-query-attention", "seq-length", "vocab-size",
    "max-position-embeddings", "micro-batch-size", "global-batch-size", "train-iters",
    "lr-warmup-iters", "lr-decay-style", "position-embedding-type", "rotary-base", "seed",
    "untie-embeddings-and-output-weights", "num-distributed-optimizer-instances",
    "pipeline-model-parallel-layout", "add-qkv-bias", "norm-epsilon", "swiglu", "fp8-format",
    "disable-bias-linear", "num-experts",
}  # fmt: skip
"""Flags of `pretrain_gpt.py` that name no field of these classes: recorded by hand."""
RENAMED = {"adam-epsilon": "adam-eps", "num-attention-heads": "num-attention-heads"}


def value(word):
    try:
        return json.loads(word)
    except ValueError:
        return word


for path in sys.argv[1:]:
    words = [line[2:].partition("=") for line in Path(path).read_text().splitlines()]
    flags = {key: value(rest) if equals else True for key, equals, rest in words}
    fields = {key.replace("-", "_"): each for key, each in flags.items()}
    classes = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    names = [{field.name for field in dataclasses.fields(each)} for each in classes]
    unknown = [
        key for key in flags
        if key not in OF_THE_SCRIPT and not any(key.replace("-", "_") in each for each in names)
    ]  # fmt: skip
    renamed = {"qk_layernorm", "kv_channels"}
    given = {key: each for key, each in fields.items() if key in names[0]}
    given |= {
        "num_query_groups": fields["num_query_groups"],
        "num_moe_experts": fields.get("num_experts"),
    }
    given |= {"gated_linear_unit": "swiglu" in flags, "bf16": "bf16" in flags}
    given |= {"add_bias_linear": "disable-bias-linear" not in flags}
    given |= {"add_qkv_bias": "add-qkv-bias" in flags}
    layout = flags.get("pipeline-model-parallel-layout")
    ranks = fields["pipeline_model_parallel_size"]
    if layout is not None:
        parsed = PipelineParallelLayerLayout.from_str(layout, ranks)
        given["pipeline_model_parallel_layout"] = parsed
        given["pipeline_dtype"] = torch.bfloat16
        stages = parsed.virtual_pipeline_model_parallel_size * ranks
        if stages > ranks:
            given["virtual_pipeline_model_parallel_size"] = stages // ranks
    config = TransformerConfig(**given)
    print(
        "PARSED",
        json.dumps(
            {
                "parallel.tensor": config.tensor_model_parallel_size,
                "parallel.pipeline": config.pipeline_model_parallel_size,
                "batch.sequence": fields["seq_length"],
                "batch.global": fields["global_batch_size"],
                "parts": stages if layout is not None else 1,
                "unknown": unknown,
            }
        ),
    )
