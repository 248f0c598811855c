"""Memory of plans on other stacks: what must hold, counted by hand for a small transformer."""

import pytest

from factories import tiny_machine
from windlass.capture import stack_graph
from windlass.cost import stack_stage_bytes
from windlass.cost.clock.stack_bytes import GATHERED_LAYERS, live_share
from windlass.models import TransformerConfig
from windlass.schema import (
    Batch,
    MemoryClass,
    Parallelism,
    Plan,
    Recompute,
    ShardingDegrees,
    Stack,
    StackMemory,
    Stage,
)

CONFIG = TransformerConfig(
    name="small", layers=6, width=64, heads=4, kv_heads=4, ffn=256, vocabulary=512, sequence=32,
    tied_embeddings=False,
)  # fmt: skip
BARE = Stack(name="test", about="", attention="flash2", memory=StackMemory(context_bytes=0))


def stages(
    stack: Stack = BARE, *, pipeline: int = 1, data: int = 4, accumulation: int = 4,
    recompute: Recompute = "none", **shards: int | bool,
) -> tuple[dict[MemoryClass, float], ...]:  # fmt: skip
    """Bytes by class of each stage; 8 layers with embedding and head, evenly spread."""
    graph = stack_graph(CONFIG, stack)
    plan = Plan(
        graph=graph.label, machine="tiny", stack=stack.name, precision="bfloat16",
        parallel=Parallelism(pipeline=pipeline, data=data),
        sharding=ShardingDegrees.model_validate(shards),
        batch=Batch(sequence=32, micro=2, accumulation=accumulation),
        stages=tuple(
            Stage(phases=((8 * at // pipeline, 8 * (at + 1) // pipeline),), recompute=recompute)
            for at in range(pipeline)
        ),
    )  # fmt: skip
    return stack_stage_bytes(plan, graph, tiny_machine().model_copy(update={"stack": stack}))


@pytest.mark.parametrize(
    ("pipeline", "virtual_stages", "micros", "first", "last"),
    [
        (4, 1, 8, 4, 1),
        (4, 1, 2, 2, 1),
        (8, 3, 64, 8 * (1 + 7 / 24), (2 * 8 + 1) / 3),
        (1, 1, 64, 1, 1),
    ],
)
def test_micro_batches_in_flight_are_those_of_narayanan(
    pipeline: int, virtual_stages: int, micros: int, first: float, last: float
):
    schedule = "interleaved" if virtual_stages > 1 else "1f1b"

    for stage, expected in ((0, first), (pipeline - 1, last)):
        found = live_share(schedule, pipeline, virtual_stages, micros, stage)
        assert found == pytest.approx(expected)


def test_without_interleaving_all_passes_forward_keep_all_micro_batches():
    assert live_share("gpipe", 4, 1, 8, 3) == 8


def test_a_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    few, full, more = (stages(pipeline=4, accumulation=a)[0]["activations"] for a in (2, 4, 64))

    assert few == pytest.approx(full / 2)
    assert full == more


def test_weights_gradients_and_optimizer_are_18_bytes_a_parameter():
    (held,) = stages()
    parameters = stack_graph(CONFIG, BARE).parameter_count

    by_hand = {"weights": 2, "gradients": 4, "optimizer": 12}
    assert {name: held[name] for name in by_hand} == pytest.approx(  # type: ignore[index]
        {name: each * parameters for name, each in by_hand.items()}
    )


def test_zero_1_divides_optimizer_state_over_replicas():
    (whole,), (shared,) = stages(), stages(optimizer=4)

    assert shared["optimizer"] == pytest.approx(whole["optimizer"] / 4)
    assert shared["weights"] == whole["weights"]


def test_fsdp_holds_its_shard_and_two_gathered_layers():
    (whole,), (shared,) = stages(), stages(parameters=4, optimizer=4, reshard=True)
    graph = stack_graph(CONFIG, BARE)
    largest = max(kind.parameter_count for kind in graph.kinds.values())

    at_once = 2 * GATHERED_LAYERS * largest  # embedding and head are the largest, and as large
    assert shared["weights"] == pytest.approx(whole["weights"] / 4 + at_once, rel=0.01)
    assert shared["gradients"] == pytest.approx(whole["gradients"] / 4 + 2 * largest, rel=0.01)


def test_full_recompute_keeps_the_outputs_of_layers_and_one_layer_whole():
    (kept,), (again,) = stages(), stages(recompute="full")
    output = 2 * 2 * 32 * CONFIG.width  # bytes of a block's output: bfloat16, micro-batch 2

    logits = 8 * 2 * 32 * CONFIG.vocabulary + 4  # the head is not recomputed; its loss is 4 bytes
    assert again["activations"] == 7 * output + logits
    assert again["working"] > kept["working"]
    assert sum(again.values()) < sum(kept.values())


def test_what_a_stack_holds_itself_comes_on_top():
    memory = StackMemory(context_bytes=1000, buffer_bytes=500, allocator_share=0.1)

    (bare,), (more,) = stages(), stages(BARE.model_copy(update={"memory": memory}))

    assert bare["runtime"] == 0
    assert more["runtime"] == pytest.approx(1500 + 0.1 * sum(bare.values()))


def test_sums_in_16_bits_hold_half_of_those_in_float32():
    (wide,), (narrow,) = stages(), stages(BARE.model_copy(update={"gradient_sums": "half"}))

    assert narrow["gradients"] == pytest.approx(wide["gradients"] / 2)
