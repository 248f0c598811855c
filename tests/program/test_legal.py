import pytest

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.errors import Faults
from windlass.program.legal import faults, require_legal
from windlass.spec.plan import Plan

GRAPH = tiny_graph(tied=False)
MACHINE = tiny_machine()


def test_a_plan_made_for_its_graph_and_machine_is_legal():
    plan = tiny_plan(GRAPH, MACHINE, accumulation=4)
    assert faults(plan, GRAPH, MACHINE, global_batch=8) == ()
    require_legal(plan, GRAPH, MACHINE, global_batch=8)


def test_all_faults_are_told_at_once():
    machine = tiny_machine(precisions=("float32",))
    tree = tiny_plan(GRAPH, machine, precision="bfloat16", sequence=128).model_dump()
    tree |= {"cut": {"replicas": 3}, "sharding": {"weights": 2}, "home": {"optimizer": "disk"}}
    plan = Plan.model_validate(tree | {"graph": "other@0", "machine": "that@1"})
    with pytest.raises(Faults) as caught:
        require_legal(plan, GRAPH, machine, global_batch=16)
    assert [fault.split(";")[0] for fault in caught.value.faults] == [
        f"the plan is for graph `other@0`, but this one is `{GRAPH.label}`",
        f"the plan is for machine `that@1`, but this one is `{machine.label}`",
        "`cut` takes 1 x 1 x 3 = 3 devices, but `tiny` has 1",
        (
            "`batch.micro` x `batch.accumulation` x `cut.replicas` = 2 x 1 x 3 = 6, "
            "but `train.batch` is 16"
        ),
        "`batch.sequence` = 128, but `tiny` takes at most 64 tokens",
        "`precision` = bfloat16, but `tiny` states no rate for it",
        "`sharding.weights` = 2 does not divide `cut.replicas` = 3",
        "`home.optimizer` = 'disk', but `tiny` has only near",
        "`sharding.weights` = 2 is not yet run by this version",
        "`home.optimizer` = disk is not yet run by this version",
    ]
