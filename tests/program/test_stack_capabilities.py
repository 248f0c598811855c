"""What a software stack cannot run is refused: each fault a sentence with its way out."""

import pytest

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.program import capability_faults, runtime_gaps
from windlass.schema import (
    OWN_STACK,
    Capabilities,
    Parallelism,
    Request,
    ShardingDegrees,
    Stack,
)

BARE = Stack(
    name="bare",
    about="data parallelism alone",
    can=Capabilities(sharding=("none",), tensor=False, pipeline=False, recompute=("none",)),
)
RICH = Stack(
    name="rich",
    about="everything of GPUs",
    can=Capabilities(
        schedules=("1f1b", "interleaved"),
        precisions=("bfloat16", "float8"),
        sharding=("none", "optimizer", "parameters"),
        reshard=True,
        context=True,
    ),
)


@pytest.mark.parametrize(
    ("override", "lacks"),
    [
        ("parallel.pipeline=8", "pipeline parallelism"),
        ("parallel.tensor=2", "tensor parallelism"),
        ("parallel.tensor=2x2", "tensor parallelism in two dimensions"),
        ("parallel.context=2", "context parallelism"),
        ("parallel.virtual_stages=2", "interleaved schedule"),
        ("sharding.parameters=4", "sharding of parameters (ZeRO-3)"),
        ("sharding.optimizer=4", "sharding of optimizer state (ZeRO-1)"),
        ("sharding.reshard=true", "gathering of parameters for each pass"),
        ("precision=float8", "computation in float8"),
        ("recompute=full", "full recompute"),
        ("moments=int8", "optimizer moments in int8"),
        ("offload.optimizer=host", "offload"),
        ("phases=4", "weights that lie outside device memory"),
    ],
)
def test_what_is_pinned_and_a_stack_lacks_is_one_sentence_with_the_way_out(
    override: str, lacks: str
) -> None:
    request, key = Request.resolve(None, (override,)), override.partition("=")[0]

    faults = [each for each in capability_faults(request, BARE) if f"no {lacks};" in each]

    assert len(faults) == 1
    assert faults[0].startswith(f"`{key}` = ")
    assert faults[0].endswith(f"but `bare` has no {lacks}; leave `{key}` out")


def test_a_stack_that_can_is_named_as_a_way_out() -> None:
    request = Request.resolve(None, ("sharding.reshard=true",))

    (fault,) = capability_faults(request, OWN_STACK, (OWN_STACK, BARE, RICH))

    assert fault.endswith("leave `sharding.reshard` out or choose `--stack rich`")


def test_all_faults_are_told_at_once_and_what_is_open_needs_nothing() -> None:
    request = Request.resolve(None, ("parallel.pipeline=2", "precision=float8", "phases=2"))

    assert len(list(capability_faults(request, BARE))) == 3
    assert not list(capability_faults(Request(), BARE))


def test_sharding_over_some_of_the_replicas_needs_groups() -> None:
    request = Request.resolve(None, ("parallel.data=8", "sharding.optimizer=4"))
    whole = Request.resolve(None, ("parallel.data=8", "sharding.optimizer=8"))

    (fault,) = capability_faults(request, RICH)

    assert "sharding over fewer than all 8 replicas (HSDP)" in fault
    assert not list(capability_faults(whole, RICH))
    assert not list(capability_faults(request, OWN_STACK))


def test_a_plan_says_what_our_own_runtime_lacks_for_it() -> None:
    plan = tiny_plan(tiny_graph(), tiny_machine())
    longer = plan.model_copy(
        update={
            "parallel": Parallelism(context=2, data=2),
            "sharding": ShardingDegrees(parameters=4, optimizer=4, reshard=True),
            "precision": "float8",
        }
    )

    assert runtime_gaps(plan) == ()
    assert runtime_gaps(longer) == ("gathering of parameters for each pass",)
