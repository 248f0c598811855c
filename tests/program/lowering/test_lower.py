from pathlib import Path

import pytest

from factories import HOST_OFFLOAD, tiny_graph, tiny_machine, tiny_plan
from windlass.errors import InputErrors
from windlass.program.instruction import Program
from windlass.program.lowering.lower import lower

MACHINE = tiny_machine(devices=8)


def shown(program: Program):
    return " ".join(
        kind[0].upper() + "".join(str(n) for n in (layer, micro) if n is not None)
        for kind, layer, micro in program.instructions
    )


def test_one_device_runs_each_micro_batch_forward_and_backward_in_turn():
    graph = tiny_graph(layers=1)
    (program,) = lower(tiny_plan(graph, MACHINE, accumulation=2), graph)
    assert shown(program) == ("L0 F00 F10 F20 B20 B10 B00 L1 F01 F11 F21 B21 B11 B01 G U0 U1 U2 S")


def test_recompute_runs_before_each_backward_except_of_embedding_and_head():
    graph = tiny_graph(layers=2)
    (program,) = lower(tiny_plan(graph, MACHINE, recompute="full", clip=False), graph)
    assert shown(program) == "L0 F00 F10 F20 F30 B30 R20 B20 R10 B10 B00 U0 U1 U2 U3 S"


def test_a_plan_may_recompute_only_the_first_layers_of_each_stage():
    graph = tiny_graph(layers=3)
    plan = tiny_plan(graph, MACHINE, recompute="full", recompute_layers=1, clip=False)
    (program,) = lower(plan, graph)
    assert shown(program) == "L0 F00 F10 F20 F30 F40 B40 B30 B20 R10 B10 B00 U0 U1 U2 U3 U4 S"
    parts = (((0, 3),), ((3, 5),), ((5, 7),))
    graph = tiny_graph(layers=5, tied=False)
    plan = tiny_plan(graph, MACHINE, pipeline=3, stages=parts, recompute="full", recompute_layers=1)
    recomputed = [
        {i.layer for i in program.instructions if i.kind == "recompute"}
        for program in lower(plan, graph)
    ]
    assert recomputed == [{1}, {3}, {5}]


def test_stages_send_outputs_onward_and_their_gradients_back():
    graph = tiny_graph(layers=0, tied=False)
    first, last = lower(tiny_plan(graph, MACHINE, pipeline=2), graph)
    assert shown(first) == "L0 F00 S00 R00 B00 G U0 S"
    assert shown(last) == "L0 R00 F10 B10 S00 G U1 S"


def test_replicas_run_one_program_and_reduce_after_the_last_micro_batch():
    graph = tiny_graph(layers=0)
    first, last = lower(tiny_plan(graph, MACHINE, data=2, accumulation=2), graph)
    assert first.instructions == last.instructions
    assert shown(first) == "L0 F00 F10 B10 B00 L1 F01 F11 B11 B01 R0 G U0 U1 S"


def test_a_plan_that_cannot_be_lowered_is_refused_with_every_reason():
    graph = tiny_graph(tied=False)
    plan = tiny_plan(graph, MACHINE)
    plan = type(plan).model_validate(
        plan.model_dump()
        | {
            "parallel": {"tensor": 2, "schedule": "zero-bubble"},
            "offload": {"parameters": "host", "gradients": "host"},
            "stages": [{"phases": [[0, 2], [2, 3]]}],
        }
    )
    with pytest.raises(InputErrors) as caught:
        lower(plan, graph)
    assert caught.value.messages == (
        "the stages cover layers [0, 3), but `tiny` has 4 layers; let the last phase end there",
        (
            "`parallel.schedule` = zero-bubble with `offload.parameters` = host: phases have a "
            "schedule of their own, in which all micro-batches run through one phase; set "
            "`parallel.schedule` = 1f1b"
        ),
        (
            "`offload.parameters` = host but `offload.optimizer` = device: offloaded parameters "
            "are updated while their optimizer state is transferred; set `offload.optimizer` = host"
        ),
        (
            "`parallel.tensor` = 2, but `tiny` was not captured for this degree; capture it so, or "
            "set it to 1"
        ),
    )


def test_tied_weights_on_two_stages_are_sent_each_step_and_their_gradient_sent_back():
    graph = tiny_graph(layers=0, tied=True)
    owner, borrower = lower(tiny_plan(graph, MACHINE, pipeline=2, accumulation=2), graph)
    kinds = (
        "send_tied_weights",
        "recv_tied_weights",
        "send_tied_grads",
        "accumulate_tied_grads",
        "forward",
        "backward",
        "grad_norm",
        "update",
    )
    assert [tuple(i) for i in owner.instructions if i.kind in kinds] == [
        ("send_tied_weights", 1, None),
        ("forward", 0, 0),
        ("forward", 0, 1),
        ("backward", 0, 0),
        ("backward", 0, 1),
        ("accumulate_tied_grads", 1, None),
        ("grad_norm", None, None),
        ("update", 0, None),
    ]
    assert [tuple(i) for i in borrower.instructions if i.kind in kinds] == [
        ("recv_tied_weights", 1, None),
        ("forward", 1, 0),
        ("backward", 1, 0),
        ("forward", 1, 1),
        ("backward", 1, 1),
        ("send_tied_grads", 1, None),
        ("grad_norm", None, None),
        ("update", 1, None),
    ]


def test_a_program_survives_its_file(tmp_path: Path):
    graph = tiny_graph()
    (program,) = lower(tiny_plan(graph, MACHINE, accumulation=2, recompute="full"), graph)
    program.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json") == program


def test_deferred_updates_survive_the_programs_file(tmp_path: Path):
    graph = tiny_graph(tied=False)
    (program,) = lower(
        tiny_plan(graph, MACHINE, offload=HOST_OFFLOAD, phases=((0, 2), (2, 4))), graph
    )
    program.save(tmp_path / "program.json")
    assert (
        Program.load(tmp_path / "program.json").flush_deferred_updates
        == program.flush_deferred_updates
        != ()
    )
