"""Published runs as plans: what must hold whatever the constants of their stacks are."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from validation.made_tables import GPT, run_of
from windlass.cost import stack_stage_bytes
from windlass.schema import Stack
from windlass.stacks import load_stack
from windlass.validation.csv_table import UnusableRow
from windlass.validation.predict_run import predict_run
from windlass.validation.published_plan import published_plan, step_seconds
from windlass.validation.published_run import PublishedRun

SUMMED = 1e-9
"""Sums of a dozen numbers in float64."""
TITAN = {
    **GPT, "source": "torchtitan", "device": "H100-SXM5-96GB", "t": "8", "d": "8", "zero": "3",
    "microbatch": "8", "sequence_parallel": "yes", "hidden": "8192", "layers": "8", "heads": "64",
    "seq": "8192",
}  # fmt: skip


@pytest.fixture
def gpt(tmp_path: Path) -> PublishedRun:
    return run_of(tmp_path)


def step(run: PublishedRun, stack: Stack | None = None, **changes: float) -> float:
    return step_seconds(published_plan(run, replace(run.config, **changes), stack))


def peak(run: PublishedRun, **changes: float) -> float:
    made = published_plan(run, replace(run.config, **changes))
    return max(
        sum(each.values()) for each in stack_stage_bytes(made.plan, made.graph, made.machine)
    )


def on_network(run: PublishedRun, **changes: float) -> PublishedRun:
    """The run on its cluster with another network."""
    return replace(run, cluster=run.cluster.model_copy(update=changes))


def test_recompute_costs_a_forward_pass_and_saves_memory(gpt: PublishedRun):
    ratio = step(gpt, recompute="full") / step(gpt, recompute="none")

    assert 1.2 < ratio < 1.5
    assert peak(gpt, recompute="full") < peak(gpt, recompute="none")


def test_each_zero_stage_that_a_plan_tells_apart_saves_memory(gpt: PublishedRun):
    peaks = [peak(gpt, zero=stage) for stage in (0.0, 1.0, 3.0)]

    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.integers(1, 5), st.integers(1, 6))
def test_the_same_batch_on_more_replicas_is_never_slower_on_one_host(
    gpt: PublishedRun, log_accumulation: int, micro: int
):
    accumulation = 2.0**log_accumulation
    fewer, more = (
        step(gpt, devices=2.0 * replicas, tensor=2.0, replicas=replicas, micro=float(micro),
             accumulation=accumulation * 2.0 / replicas)
        for replicas in (2.0, 4.0)
    )  # fmt: skip

    assert more <= fewer


def test_more_micro_batches_take_longer_and_fill_the_pipeline_better(gpt: PublishedRun):
    few, many = (
        step(gpt, pipeline=4.0, replicas=8.0, accumulation=accumulation)
        for accumulation in (4.0, 16.0)
    )

    assert few < many < 4 * few


@pytest.mark.parametrize(("cut", "over_16_bits"), [({"t": 1, "d": 64}, 1.0), ({}, 1.1)])
def test_row_scales_cost_more_than_tensor_scales_and_gain_where_products_are_large(
    tmp_path: Path, cut: dict[str, int], over_16_bits: float
):
    """At t = 8 torchtitan published 600 tokens/s with row scales, 597 with 16 bits."""
    rows, tensors, wide = (
        step(run_of(tmp_path, TITAN, precision=precision, microbatch=2, **cut))
        for precision in ("float8 rowwise", "float8 tensorwise", "bf16")
    )

    assert tensors < rows < over_16_bits * wide
    assert tensors < wide


def test_rings_that_share_cards_with_several_ranks_a_host_take_longer(gpt: PublishedRun):
    """vTrain's hosts have 8 devices on 4 cards: t of 2 and 4 give several rings of several."""

    def longer(tensor: float) -> bool:
        cut = {"tensor": tensor, "replicas": 64.0 / tensor}
        crowded, plain = (step(on_network(gpt, crowding=c), **cut) for c in (2.0, 0.0))
        assert crowded >= plain
        return crowded > plain * (1 + SUMMED)

    assert [longer(tensor) for tensor in (1.0, 2.0, 4.0, 8.0)] == [False, True, True, False]


def test_no_ring_is_crowded_where_each_device_has_its_own_card(gpt: PublishedRun):
    crowded, plain = (step(on_network(gpt, crowding=c, shared_by=1)) for c in (2.0, 0.0))

    assert crowded == pytest.approx(plain, rel=SUMMED)


def test_more_hosts_wait_longer_for_the_slowest(gpt: PublishedRun):
    few, many = (
        step(on_network(gpt, stragglers=0.1), **hosts)
        / step(on_network(gpt, stragglers=0.0), **hosts)
        for hosts in ({"devices": 16.0, "replicas": 8.0}, {"devices": 512.0, "replicas": 256.0})
    )

    assert 1.0 < few < many


def test_a_last_stage_with_fewer_layers_hides_the_head(tmp_path: Path):
    """BLOOM's early plans: 78 layers over 12 stages leave one beside a vocabulary of 250,000."""

    def seconds(vocabulary: int) -> float:
        run = run_of(
            tmp_path, layers=78, hidden=13824, heads=64, vocab=vocabulary, t=4, p=12, d=1,
            n_devices=48, global_batch=256, microbatch=2,
        )  # fmt: skip
        return step(run)

    logits = 6 * 2048 * 2 * 250_000 * 13824 / 4 / 312e12  # of one micro-batch, at the peak rate
    assert seconds(250_000) - seconds(1000) < 128 * logits / 2


def test_layers_that_do_not_fill_a_chunk_leave_the_last_ones_shorter(tmp_path: Path):
    run = run_of(tmp_path, layers=78, t=4, p=12, d=1, n_devices=48)

    stages = published_plan(run, run.config).plan.stages

    assert [stage.end_layer - stage.first_layer for stage in stages] == [8, *[7] * 10, 2]


def test_embedding_and_head_fill_chunks_of_their_own_if_there_are_more_than_blocks(tmp_path: Path):
    """Published: Megatron-Bridge's Llama 3.1 405B, 126 blocks in 16 stages of 8 chunks."""
    run = run_of(tmp_path, layers=14, p=4, interleave=4, t=1, d=4, n_devices=16, global_batch=64,
                 microbatch=1)  # fmt: skip

    stages = published_plan(run, run.config).plan.stages

    assert [stage.phases for stage in stages] == [((at, at + 1),) for at in range(16)]


def test_a_batch_that_cannot_be_interleaved_is_refused(tmp_path: Path):
    run = run_of(tmp_path, layers=32, t=8, p=4, d=2, interleave=2, global_batch=12, microbatch=1)

    with pytest.raises(UnusableRow, match="6 micro-batches are no multiple of 4 stages"):
        predict_run(run)


def test_a_row_without_micro_batch_takes_the_fastest_that_fits(tmp_path: Path):
    open_row = {name: cell for name, cell in GPT.items() if name != "microbatch"}
    found = predict_run(run_of(tmp_path, open_row))

    stated = [predict_run(run_of(tmp_path, microbatch=b)) for b in (1, 2, 4, 8)]
    fastest = min((one for one in stated if one.fits), key=lambda one: one.step_seconds)
    assert found.config == fastest.config


def test_ranks_that_divide_the_sequence_divide_the_time_of_attention_and_tokens(
    gpt: PublishedRun,
):
    long = replace(gpt, shape=replace(gpt.shape, sequence=32768.0))
    cut = {"devices": 4.0, "tensor": 1.0, "accumulation": 8.0, "micro": 1.0}
    alone = step(long, **{**cut, "devices": 1.0}, replicas=1.0)

    divided = step(long, **cut, replicas=1.0, context=4.0)

    assert alone / 4 < divided < alone / 2


def test_fsdp_that_reshards_gathers_weights_for_each_pass(tmp_path: Path):
    run = run_of(tmp_path, source="our own", zero="3 (FSDP)", t=1, d=64, microbatch=1)
    slow = on_network(run, network=1e9)
    made = published_plan(slow, slow.config)

    assert made.plan.sharding.parameters == 64
    assert made.plan.sharding.reshard
    gathered = 2 * made.graph.parameter_count * 63 / 64  # bytes, over 4 cards of a host or all 8
    passes = 2 * slow.config.accumulation  # forward and backward, of each micro-batch
    assert step(slow) > passes * gathered / 8e9
    assert peak(slow) < peak(slow, zero=0.0)


def test_an_unknown_stack_counts_as_a_modern_one(tmp_path: Path):
    run = run_of(tmp_path, source="our own", device="H100-SXM5-80GB")

    stack = load_stack(run.cluster.stack)
    assert stack.attention != "unfused"
    assert step(run) < step(run, stack.model_copy(update={"attention": "unfused"}))


def test_a_pipelined_message_carries_one_ranks_part(tmp_path: Path):
    run = run_of(tmp_path, t=8, p=4, d=2, layers=32)
    made = published_plan(run, run.config)

    block = made.graph.tensor_shards[8]["block"].cost("bfloat16", compiled=False)
    assert block.sent_bytes is not None
    assert block.sent_bytes.at(4, 2048) == 2 * 4 * 2048 * 3072 / 8


def test_a_run_that_nothing_was_fitted_to_has_a_wider_interval(tmp_path: Path):
    known, unknown = map(predict_run, (run_of(tmp_path), run_of(tmp_path, source="our own")))

    def width(low: float, high: float) -> float:
        return high / low

    assert width(known.low_seconds, known.high_seconds) < width(
        unknown.low_seconds, unknown.high_seconds
    )
