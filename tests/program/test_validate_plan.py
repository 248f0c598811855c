from typing import Any

import pytest

from factories import HOST_OFFLOAD, late_tied_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.errors import InputErrors
from windlass.program.validate_plan import plan_errors, require_valid_plan
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan

GRAPH = tiny_graph(tied=False)
MACHINE = tiny_machine(host="1 GiB", disk="1 GiB")
TWO = ((0, 2), (2, 4))


def test_a_plan_made_for_its_graph_and_machine_is_valid():
    plan = tiny_plan(GRAPH, MACHINE, accumulation=4)
    assert plan_errors(plan, GRAPH, MACHINE, global_batch=8) == ()
    require_valid_plan(plan, GRAPH, MACHINE, global_batch=8)


def test_all_errors_are_reported_at_once():
    machine = tiny_machine(precisions=("float32",))
    tree = tiny_plan(GRAPH, machine, precision="bfloat16", sequence=128).model_dump()
    tree |= {
        "parallel": {"data": 3},
        "sharding": {"parameters": 2},
        "offload": {"optimizer": "disk"},
    }
    plan = Plan.model_validate(tree | {"graph": "other@0", "machine": "that@1"})
    with pytest.raises(InputErrors) as caught:
        require_valid_plan(plan, GRAPH, machine, global_batch=16)
    assert [message.split(";")[0] for message in caught.value.messages] == [
        f"the plan is for graph `other@0`, but this one is `{GRAPH.label}`",
        f"the plan is for machine `that@1`, but this one is `{machine.label}`",
        "`parallel` takes 1 x 1 x 3 = 3 devices, but `tiny` has 1",
        (
            "`batch.micro` x `batch.accumulation` x `parallel.data` = 2 x 1 x 3 = 6, "
            "but `train.batch` is 16"
        ),
        "`batch.sequence` = 128, but `tiny` takes at most 64 tokens",
        "`precision` = bfloat16, but `tiny` states no rate for it",
        "`offload.optimizer` = 'disk', but `tiny` has only device",
        (
            "`sharding.parameters` = 2 does not divide `sharding.optimizer` = 1: a device updates "
            "a part of the parameters that it stores"
        ),
    ]


def test_a_stage_recomputes_no_more_layers_than_it_can():
    plan = tiny_plan(GRAPH, MACHINE)
    stage = plan.stages[0].model_copy(update={"recompute": "full", "recompute_layers": 2})
    assert plan_errors(plan.model_copy(update={"stages": (stage,)}), GRAPH, MACHINE) == ()
    many = stage.model_copy(update={"recompute_layers": 3})
    (message,) = plan_errors(plan.model_copy(update={"stages": (many,)}), GRAPH, MACHINE)
    assert message.startswith("`stages.0.recompute_layers` = 3, but the stage has 2 layers")


@pytest.mark.parametrize(
    ("offload", "phases"),
    [
        (HOST_OFFLOAD, TWO),
        (HOST_OFFLOAD.model_copy(update={"activations": "host"}), ((0, 1), (1, 2), (2, 3), (3, 4))),
        (Offload(optimizer="host"), None),
        (Offload(activations="host"), None),
        (Offload(optimizer="host", activations="host"), None),
    ],
)
def test_these_classes_may_be_offloaded_together(
    offload: Offload, phases: tuple[tuple[int, int], ...] | None
):
    assert (
        plan_errors(tiny_plan(GRAPH, MACHINE, offload=offload, phases=phases), GRAPH, MACHINE) == ()
    )


@pytest.mark.parametrize(
    ("offload", "phases", "message"),
    [
        (
            Offload(parameters="host", gradients="host"),
            TWO,
            (
                "`offload.parameters` = host but `offload.optimizer` = device: offloaded "
                "parameters are updated while their optimizer state is transferred; set "
                "`offload.optimizer` = host"
            ),
        ),
        (
            Offload(parameters="host", optimizer="host"),
            TWO,
            (
                "`offload.parameters` = host but `offload.gradients` = device: gradients of "
                "offloaded parameters must be offloaded too; set `offload.gradients` = host"
            ),
        ),
        (
            Offload(gradients="host", optimizer="host"),
            None,
            (
                "`offload.gradients` = host but `offload.parameters` = device: only gradients of "
                "offloaded parameters are offloaded; set `offload.parameters` and "
                "`offload.optimizer` = host, or `offload.gradients` = device"
            ),
        ),
        (
            HOST_OFFLOAD,
            None,
            (
                "`offload.parameters` = host but `stages.0.phases` = 1: with all layers in one "
                "phase no parameters would ever be offloaded; split the layers into at least 2 "
                "phases"
            ),
        ),
        (
            Offload(parameters="host", gradients="host", optimizer="disk"),
            TWO,
            (
                "`offload.parameters` = host but `offload.optimizer` = disk: in float32 the "
                "weights are the master weights, which are stored with the moments; name one tier "
                "for both, or set `precision` = bfloat16"
            ),
        ),
        (
            Offload(optimizer="host"),
            TWO,
            (
                "`stages.0.phases` = 2 but `offload.parameters` = device: only offloaded "
                "parameters need phases; offload them, or put all layers into 1 phase"
            ),
        ),
    ],
)
def test_invalid_combinations_of_offloaded_classes_are_refused_with_the_way_out(
    offload: Offload, phases: tuple[tuple[int, int], ...] | None, message: str
):
    plan = tiny_plan(GRAPH, MACHINE, offload=offload, phases=phases)
    assert plan_errors(plan, GRAPH, MACHINE) == (message,)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"data": 3, "sharding": (2, 3)},
            (
                "`sharding.parameters` = 2 does not divide `sharding.optimizer` = 3: a device "
                "updates a part of the parameters that it stores; make `sharding.optimizer` a "
                "multiple of `sharding.parameters`"
            ),
        ),
        (
            {"data": 4, "sharding": (1, 3)},
            "`sharding.optimizer` = 3 does not divide `parallel.data` = 4; choose a divisor",
        ),
        (
            {"pipeline": 2, "schedule": "interleaved"},
            (
                "`parallel.schedule` = interleaved with `parallel.virtual_stages` = 1 and "
                "`parallel.pipeline` = 2: model chunks take turns only if there are 2 or more of "
                "each; raise them or set `parallel.schedule` = 1f1b"
            ),
        ),
        (
            {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "accumulation": 3},
            (
                "`parallel.schedule` = interleaved with `batch.accumulation` = 3, which is not a "
                "multiple of `parallel.pipeline` = 2; make it one"
            ),
        ),
        (
            {"pipeline": 2, "virtual_stages": 2},
            (
                "`parallel.virtual_stages` = 2 with `parallel.schedule` = 1f1b, which runs a stage "
                "as one model chunk; set `parallel.schedule` = interleaved or "
                "`parallel.virtual_stages` = 1"
            ),
        ),
        (
            {"data": 4, "sharding": (1, 2), "offload": HOST_OFFLOAD, "phases": TWO},
            (
                "`sharding.optimizer` = 2 with `offload.parameters` = host and "
                "`sharding.parameters` = 1: this version runs offloaded sharded parameters only if "
                "both degrees are equal; make them equal, or set `offload.parameters` = device"
            ),
        ),
        (
            {"pipeline": 2, "offload": HOST_OFFLOAD},
            (
                "`offload.parameters` = host but `stages.*.phases` = 1: with all layers in one "
                "phase no parameters would ever be offloaded; split the layers into at least 2 "
                "phases"
            ),
        ),
    ],
)
def test_invalid_combinations_of_degrees_and_schedules_are_refused_with_the_way_out(
    choice: dict[str, Any], message: str
):
    machine = tiny_machine(host="1 GiB", devices=4)
    choice = {"accumulation": 2, **choice}
    assert plan_errors(tiny_plan(GRAPH, machine, **choice), GRAPH, machine) == (message,)


def test_a_layer_with_tied_weights_of_two_other_stages_is_refused():
    graph = two_owners()
    machine = tiny_machine(devices=3)
    plan = tiny_plan(graph, machine, pipeline=3)
    assert plan_errors(plan, graph, machine) == (
        (
            "layer 2 on stage 2 uses weights of 2 layers on other stages; divide the stages so "
            "that all but one of them are on the same stage"
        ),
    )
    assert plan_errors(tiny_plan(graph, machine, pipeline=1), graph, machine) == ()


def two_owners() -> Graph:
    """An embedding and a block that each own a table, and a head that is tied to both."""
    graph = late_tied_graph(before=0, between=0)
    head, table = graph.kinds["head"], graph.kinds["embedding"].parameters[0]
    second = table.model_copy(
        update={"name": "second.weight", "tied_to": "embedding.tokens.weight"}
    )
    both = head.model_copy(update={"parameters": (*head.parameters, second)})
    return graph.model_copy(update={"kinds": {**graph.kinds, "head": both}})
