"""Graphs of other stacks: parameters, FLOP and activations, against what papers print."""

from dataclasses import replace

import pytest

from windlass.capture import stack_graph
from windlass.models import (
    TransformerConfig,
    model_config,
    published_active_parameters,
    published_parameter_count,
)
from windlass.program import pass_ops
from windlass.schema import LayerCost, Stack
from windlass.stacks import load_stack

GPT3 = model_config("gpt3-175b")
MEGATRON = load_stack("megatron-core")
LLAMA, TITAN = model_config("llama3-8b"), load_stack("torchtitan")
UNFUSED = Stack(name="test", about="", attention="unfused", dropout=True)
PRINTED = 0.01
"""Papers print parameters to three digits; norms and biases are counted here too."""
ROUNDED_ACTIVE = 0.04
"""Active parameters are printed to two digits."""
KORTHIKANTI = {
    "22B": ((6144, 64, 4, 8, 48), 59.25),
    "175B": ((12288, 96, 1, 8, 96), 66.84375 / (1 + 7 / 24)),
}
"""Width, heads, micro-batch, t and layers; GiB of activations without recompute, per layers of one
stage's micro-batches in flight (8 stages of 3 chunks hold 1 + 7/24 times them). Source: Korthikanti
et al. 2022, arXiv:2205.05198, figures 1 and 7."""


def block(
    config: TransformerConfig, stack: Stack, tensor: int = 1, *, selective: bool = False
) -> LayerCost:
    graph = stack_graph(config, stack, (tensor,))
    kinds = graph.kinds if tensor == 1 else graph.tensor_shards[tensor]
    return kinds["block"].cost("bfloat16", compiled=False, selective=selective)


def activations(cost: LayerCost, micro: int, sequence: int) -> float:
    """Bytes that a block keeps, with its output: the input of the next."""
    return cost.saved_bytes.at(micro, sequence) + cost.output_bytes.at(micro, sequence)


@pytest.mark.parametrize("name", ["gpt2-124m", "gpt2-1.5b", "llama3-8b", "llama3-70b", "gpt3-175b"])
def test_parameters_are_the_published_count(name: str):
    graph = stack_graph(model_config(name), MEGATRON)

    assert graph.parameter_count == pytest.approx(published_parameter_count(name), rel=PRINTED)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b"])
@pytest.mark.parametrize("attention", ["unfused", "flash2"])
def test_model_flop_of_a_token_are_those_that_the_palm_paper_counts(name: str, attention: str):
    """Chowdhery et al. 2022, appendix B: `6 P + 12 L d s`; kernels repeat scores backward."""
    config = model_config(name)
    graph = stack_graph(config, UNFUSED.model_copy(update={"attention": attention}))
    tokens = config.sequence

    flop = graph.micro_batch_flop(1, tokens) / tokens

    scores = 12 * config.layers * config.width * config.sequence
    again = scores / 6 if attention == "flash2" else 0
    looked_up = 0 if config.tied_embeddings else config.vocabulary * config.width
    expected = 6 * (graph.parameter_count - looked_up) + scores + again
    assert flop == pytest.approx(expected, rel=2e-3)  # positions, norms and biases


@pytest.mark.parametrize("attention", ["unfused", "flash2"])
def test_a_block_without_scores_keeps_34_bytes_a_number_and_with_them_5_a_score(attention: str):
    config = replace(GPT3, sequence=2048)
    stack = UNFUSED.model_copy(update={"attention": attention})
    b, s, d, a = 2, 2048, config.width, config.heads

    kept = activations(block(config, stack), b, s)

    scores = 5 * a * s / d if attention == "unfused" else 0
    assert kept == pytest.approx(s * b * d * (34 + scores))


@pytest.mark.parametrize("model", KORTHIKANTI)
def test_activations_without_sequence_parallelism_are_those_of_korthikanti(model: str):
    (width, heads, micro, tensor, layers), gib = KORTHIKANTI[model]
    config = replace(GPT3, width=width, heads=heads, kv_heads=heads, ffn=4 * width, layers=layers)
    stack = UNFUSED.model_copy(update={"sequence_parallel": False})

    kept = layers * activations(block(config, stack, tensor), micro, 2048) / 2**30

    assert kept == pytest.approx(gib, rel=5e-4)  # printed to two decimals


def test_sequence_parallel_and_selective_recompute_leave_34_bytes_over_t():
    kept = activations(block(GPT3, UNFUSED, 8, selective=True), 1, 2048)

    assert kept == pytest.approx(2048 * GPT3.width * 34 / 8)


def test_sequence_parallelism_exchanges_the_same_bytes_in_other_collectives():
    def kinds(sequence_parallel: bool) -> list[str]:
        stack = UNFUSED.model_copy(update={"sequence_parallel": sequence_parallel})
        cost = block(GPT3, stack, 8)
        return [op.collective.kind for op in cost.forward if op.collective]

    assert kinds(False) == ["all_reduce"] * 2
    assert kinds(True) == ["all_gather", "reduce_scatter"] * 2


def test_a_rank_sends_its_part_of_a_blocks_output():
    sent = block(GPT3, UNFUSED, 8).sent_bytes

    assert sent is not None
    assert sent.at(1, 2048) == 2 * 2048 * GPT3.width / 8


def test_heads_that_a_degree_does_not_divide_are_named():
    graph = stack_graph(model_config("llama3-8b"), MEGATRON, (8, 16))

    assert set(graph.unshardable) == {16}
    assert "8 `kv_heads`, which 16 does not divide" in graph.unshardable[16][0]


def test_of_8_bit_products_torchtitan_saves_attention_alone_and_repeats_the_rest():
    kind = stack_graph(LLAMA, TITAN).kinds["block"]
    bfloat16, float8 = (
        kind.cost(precision, compiled=False, selective=True) for precision in ("bfloat16", "float8")
    )

    assert float8.saved_bytes.bs == 2 * LLAMA.width
    assert float8.saved_bytes.bs < bfloat16.saved_bytes.bs
    repeated = {op.name for op in float8.backward[: len(float8.backward) // 2]}
    assert {"qkv", "projection", "widen"} <= repeated


def test_torchs_recompute_ends_before_a_blocks_last_product():
    def repeated(stack: Stack) -> list[str]:
        kind = stack_graph(LLAMA, stack).kinds["block"]
        cost = kind.cost("bfloat16", compiled=False)
        return [op.name for op in pass_ops("recompute", kind, cost, reach="input")]

    assert "narrow" not in repeated(TITAN)
    assert repeated(MEGATRON)[-2:] == ["narrow", "residual"]


def test_a_model_with_experts_has_its_published_parameters_and_multiplies_the_active_ones():
    config = model_config("qwen3-30b-a3b")
    graph = stack_graph(config, load_stack("nemo"))
    active = published_active_parameters("qwen3-30b-a3b")
    assert active is not None

    assert graph.parameter_count == pytest.approx(
        published_parameter_count("qwen3-30b-a3b"), rel=PRINTED
    )
    tokens = 16  # scores of so few are below a hundredth
    flop = graph.micro_batch_flop(1, tokens) / tokens
    looked_up = config.vocabulary * config.width
    assert flop == pytest.approx(6 * (active - looked_up), rel=ROUNDED_ACTIVE)


def test_blocks_with_a_window_and_without_are_kinds_of_their_own():
    config = replace(LLAMA, sliding_window=128, window_blocks=(True, False))
    graph = stack_graph(config, TITAN)

    assert [run.kind for run in graph.layer_runs[1:5]] == ["block", "block1", "block", "block1"]
    seen, all_seen = (
        next(op for op in graph.kinds[kind].costs[0].forward if op.kind == "attention")
        for kind in ("block", "block1")
    )
    assert seen.flop.at(1, 8192) / all_seen.flop.at(1, 8192) == pytest.approx(2 * 128 / 8192)


def test_beside_frozen_weights_adapters_alone_have_gradients_and_state():
    stack = load_stack("nemo")
    whole, adapted = stack_graph(LLAMA, stack), stack_graph(LLAMA, stack, adapter=16)

    wide_and_deep = (
        LLAMA.width + (LLAMA.heads + 2 * LLAMA.kv_heads) * LLAMA.head_width,
        2 * LLAMA.width, LLAMA.width + 2 * LLAMA.ffn, LLAMA.ffn + LLAMA.width,
    )  # fmt: skip
    assert adapted.trained_count == 16 * LLAMA.layers * sum(wide_and_deep)
    assert adapted.parameter_count == whole.parameter_count + adapted.trained_count
    assert adapted.gradient_reach(0) == "nothing"
    share = adapted.micro_batch_flop(1, 512) / whole.micro_batch_flop(1, 512)
    assert share == pytest.approx(2 / 3, abs=0.02), "no products for gradients of weights"
