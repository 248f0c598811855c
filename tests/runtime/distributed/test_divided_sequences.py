"""Ranks that divide sequences (context parallelism) train a model as a single device does."""

import json
from pathlib import Path

import pytest

from factories import tiny_plan
from rank_pool import BATCH, LAYERS, MACHINE, OFFLOADED, SEQUENCE, CheckedPlans, RankPool, slow
from windlass.schema.tensor_grid import TensorGrid

WINDOWED = {
    "model_type": "gemma2", "num_hidden_layers": LAYERS - 2, "hidden_size": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 48,
    "vocab_size": 300, "max_position_embeddings": 48, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 4, "tie_word_embeddings": True,
}  # fmt: skip
"""A Gemma 2 with grouped queries and capped scores, whose tokens see six others in every second
block, and all in the others."""


def test_ranks_that_divide_sequences_see_masked_and_windowed_tokens_of_the_others(
    encoders: RankPool, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED))
    model = f"hf:{tmp_path / 'config.json'}"
    windowed = RankPool(tmp_path, 4, (), model=model, processes=encoders.processes)
    for pool in (encoders, windowed):
        plan = tiny_plan(
            pool.graph, MACHINE, context=2, micro=4, accumulation=BATCH // 4, sequence=SEQUENCE,
            precision="float64",
        )  # fmt: skip
        result, _ = pool.verify(plan)
        assert result.passed, result.first_mismatch


@pytest.mark.parametrize(
    "degrees",
    [
        {"context": 4},
        slow({"context": 2, "pipeline": 2, "schedule": "zero-bubble"}),
        slow({"context": 2, "data": 2, "sharding": (2, 4), "recompute": "full"}),
        {"context": 2, "tensor": 2},
        slow({"context": 2, "recompute": "selective"}),
    ],
    ids=str,
)
def test_ranks_that_divide_sequences_equal_a_single_device(pool: RankPool, degrees: dict):
    plan = tiny_plan(
        pool.graph, MACHINE, micro=2, accumulation=BATCH // 2 // degrees.get("data", 1),
        sequence=SEQUENCE, precision="float64", **degrees,
    )  # fmt: skip
    CheckedPlans().check(pool, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"context": 4, "tensor": 2},
        {"context": 2, "tensor": 4},
        {"context": 2, "tensor": TensorGrid(2, 2)},
        {"context": 2, "tensor": 2, "pipeline": 2, "recompute": "selective"},
        {"context": 2, "tensor": 2, "data": 2, "sharding": (2, 4), "recompute": "full"},
    ],
    ids=str,
)
def test_eight_ranks_that_divide_sequences_and_layers_equal_a_single_device(
    wide_pool: RankPool, degrees: dict
):
    plan = tiny_plan(
        wide_pool.graph, MACHINE, micro=1, accumulation=BATCH // degrees.get("data", 1),
        sequence=SEQUENCE, precision="float64", **degrees,
    )  # fmt: skip
    CheckedPlans().check(wide_pool, plan)


def test_ranks_that_divide_sequences_run_in_phases_from_a_disk(pool: RankPool) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, context=2, tensor=2, micro=4, accumulation=BATCH // 4,
        sequence=SEQUENCE, offload=OFFLOADED[0], stages=(((0, 2), (2, 4), (4, LAYERS)),),
        recompute="full",
    )  # fmt: skip
    CheckedPlans().check(pool, plan)
