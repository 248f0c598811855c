"""Laws of distributed programs: they verify, fit their peak, and send what formulas say."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from factories import HOST_OFFLOAD, tiny_graph, tiny_machine, tiny_plan
from program.distributed_plans import MACHINE, distributed_plans
from program_bytes import sent_bytes_by_kind
from windlass.errors import PlanError
from windlass.program.activation_checkpointing import is_recomputed
from windlass.program.communication_volume import CommunicationVolume
from windlass.program.device_mesh import layers_of_stage, mesh_coord
from windlass.program.instruction import GRADIENT_PASSES, WEIGHT_PASSES, Instruction, Program
from windlass.program.lowering.lower import lower
from windlass.program.memory.liveness import memory_profile
from windlass.program.memory.offloaded_bytes import offloaded_bytes_by_tier
from windlass.program.memory.stage_tensors import StageTensors
from windlass.program.phases import offloaded_gradient_layers, owned_layers
from windlass.program.tied_weights import tied_across_stages, tied_owner_layers
from windlass.program.validate_plan import plan_errors
from windlass.program.verify.verify import verify_programs
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import grid_columns, grid_rows

GRAPH = tiny_graph(layers=4)


def peak_of(programs: Iterable[Program], plan: Plan, graph: Graph) -> int:
    return max(memory_profile(program, plan, graph).peak_bytes for program in programs)


@settings(max_examples=60)
@given(drawn=distributed_plans())
def test_every_valid_distributed_plan_lowers_to_programs_that_verify_and_fit_exactly_their_peak(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    assert all("this version runs" in fault for fault in plan_errors(plan, graph, MACHINE))
    programs = lower(plan, graph)
    peak = peak_of(programs, plan, graph)
    verify_programs(programs, plan, graph, {"device": peak})
    with pytest.raises(PlanError, match="`device` overflows by 1 bytes"):
        verify_programs(programs, plan, graph, {"device": peak - 1})


@given(drawn=distributed_plans())
def test_all_ranks_of_a_stage_run_one_program(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    by_stage: dict[int, set[tuple[Instruction, ...]]] = {}
    for program in lower(plan, graph):
        stage = mesh_coord(program.device, plan.parallel).stage
        by_stage.setdefault(stage, set()).add(program.instructions)
    assert [len(each) for each in by_stage.values()] == [1] * plan.parallel.pipeline


@given(drawn=distributed_plans())
def test_a_gradient_is_reduced_after_its_last_backward_pass_has_sent_the_input_gradient(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    tied_owners = tied_owner_layers(graph)
    for program in lower(plan, graph):
        stage = mesh_coord(program.device, plan.parallel).stage
        for layer in owned_layers(plan, graph, stage):
            if not StageTensors(plan, graph, stage).reduces_gradients(layer):
                continue
            instructions = program.instructions
            at = instructions.index(Instruction("reduce_grads", layer))
            adds = [
                index
                for index, each in enumerate(instructions)
                if each.kind in GRADIENT_PASSES
                and layer in (each.layer, *tied_owners[each.layer or 0])
            ]
            between = {each.kind for each in instructions[max(adds) + 1 : at]}
            if offloaded_gradient_layers(plan, graph, stage) or plan.batch.accumulation == 1:
                assert between <= {"free_weights", "accumulate_tied_grads", "send_tied_grads"}
            elif "send" in between:
                last = {
                    each.micro_batch
                    for each in instructions[max(adds) : at]
                    if each.kind in GRADIENT_PASSES
                }
                assert last == {plan.batch.accumulation - 1}
            else:  # zero-bubble has sent it long since, and the first stage sends nothing back
                assert between <= {
                    "free_weights",
                    "accumulate_tied_grads",
                    "send_tied_grads",
                    "reduce_grads",
                    "update",
                }


@given(drawn=distributed_plans())
def test_sharded_weights_stay_unsharded_until_the_last_pass_of_their_layer(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    tied_owners = tied_owner_layers(graph)
    for program in lower(plan, graph) if plan.sharding.parameters > 1 else ():
        stage = mesh_coord(program.device, plan.parallel).stage
        for layer in owned_layers(plan, graph, stage):
            passes, freed = (
                [
                    at
                    for at, each in enumerate(program.instructions)
                    if each.kind in kinds and layer in (each.layer, *tied_owners[each.layer or 0])
                ]
                for kinds in ((*WEIGHT_PASSES, *GRADIENT_PASSES), ("free_weights",))
            )
            assert max(freed) > max(passes)


@given(drawn=distributed_plans())
def test_weights_are_unsharded_once_a_phase_however_many_micro_batches(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    more = plan.batch.accumulation + 2 * plan.parallel.pipeline
    larger = plan.model_copy(update={"batch": plan.batch.model_copy(update={"accumulation": more})})
    lowered = (lower(plan, graph), lower(larger, graph))
    for device in range(plan.parallel.devices):
        few, many = (_unshards(programs[device].instructions) for programs in lowered)
        stage = mesh_coord(device, plan.parallel).stage
        assert few == many
        for layer in owned_layers(plan, graph, stage) if plan.sharding.parameters > 1 else ():
            assert few[layer] == _turns(plan, graph, stage, layer)


def _unshards(instructions: Iterable[Instruction]) -> dict[int | None, int]:
    counts: dict[int | None, int] = {}
    for kind, layer, _ in instructions:
        if kind == "unshard_weights":
            counts[layer] = counts.get(layer, 0) + 1
    return counts


def _turns(plan: Plan, graph: Graph, stage: int, layer: int) -> int:
    """How often a layer is unsharded: each time a phase uses it that the phase before did not.

    Backward passes of a phase use those of its layers that are not frozen at the front.
    """
    if not plan.is_offloaded("parameters"):
        return 1
    tied_owners = tied_owner_layers(graph)
    chunks = plan.stages[stage :: plan.parallel.pipeline]
    phases = [phase for chunk in chunks for phase in chunk.phases]
    used, used_backward = (
        [
            any(layer == at or layer in tied_owners[at] for at in range(max(begin, front), end))
            for begin, end in phases
        ]
        for front in (0, graph.first_trained)
    )
    forward = sum(now and not before for before, now in pairwise([False, *used]))
    backward = zip(used_backward[:-1], used[1:], strict=True)
    return forward + sum(now and not before for now, before in backward)


@given(drawn=distributed_plans(trained=True))
def test_a_device_sends_what_the_formulas_say(drawn: tuple[Graph, Plan]):
    """An independent count from the plan: bytes of a stage's layers, and how often they move.

    Where replicas divide experts, `test_expert_parallel.py` counts.
    """
    graph, plan = drawn
    assume(plan.parallel.expert is None)
    r, rts, shards = plan.parallel.data, plan.sharding.parameters, plan.sharding.optimizer
    t = plan.parallel.tensor
    for device in range(plan.parallel.devices):
        stage, index, _ = mesh_coord(device, plan.parallel)
        kinds = list(graph.shard(t, index).layer_kinds())
        due = dict.fromkeys(
            (
                "unshard_weights",
                "all_gather_params",
                "reduce_grads",
                "send",
                "send_tied_weights",
                "send_tied_grads",
            ),
            0,
        )
        due |= _collective_bytes(plan, graph, stage)
        for layer in owned_layers(plan, graph, stage):
            flat = -(-kinds[layer].parameter_count // shards) * shards
            turns = _turns(plan, graph, stage, layer)
            due["unshard_weights"] += turns * flat * plan.parameter_itemsize * (rts - 1) // rts
            due["all_gather_params"] += (
                flat * plan.parameter_itemsize * (shards // rts - 1) // shards
            )
            scattered = flat * plan.gradient_itemsize * (shards - 1) // shards
            others = 2 * (flat * plan.gradient_itemsize // shards) * (r // shards - 1)
            due["reduce_grads"] += scattered + others // (r // shards)
            rows, columns = grid_rows(t), grid_columns(t)
            norm = 32 // columns * (kinds[layer].parameters[-1].name == "norm.weight")
            due["reduce_grads"] += 2 * norm * plan.gradient_itemsize * (rows - 1) // rows
        due["send"] = _boundary_bytes(plan, graph, stage)
        for tied in tied_across_stages(plan, graph, index):
            due["send_tied_weights"] += (
                tied.elements * plan.parameter_itemsize * (tied.owner_stage == stage)
            )
            due["send_tied_grads"] += (
                tied.elements * plan.gradient_itemsize * (tied.user_stage == stage)
            )
        expected: dict[str, int] = {kind: nbytes for kind, nbytes in due.items() if nbytes}
        assert sent_bytes_by_kind(plan, graph, device) == expected


def _boundary_bytes(plan: Plan, graph: Graph, stage: int) -> int:
    """Bytes of outputs and gradients, of equal size, that a stage sends over its boundaries."""
    local_layers = set(layers_of_stage(plan, stage))
    width = (
        plan.batch.micro
        * plan.batch.sequence
        * 32
        * plan.parameter_itemsize
        // plan.parallel.tensor
    )
    boundaries = sum(
        (at in local_layers) != (at + 1 in local_layers) for at in range(graph.layers - 1)
    )
    return plan.batch.accumulation * boundaries * width


def _collective_bytes(plan: Plan, graph: Graph, stage: int) -> dict[str, int]:
    """Bytes sent in tensor-parallel collectives, by kind of pass.

    Each pass of a block all-gathers and reduce-scatters tokens. In a grid the ranks of one column
    do so with their own features, and the ranks of one row also gather or scatter the product's
    results. The embedding all-reduces its rows in forward, and their gradient in backward. The head
    all-gathers tokens and all-reduces one number per token in forward, and reduce-scatters the
    gradient of tokens in backward.
    """
    t, local_layers = plan.parallel.tensor, layers_of_stage(plan, stage)
    tokens = plan.batch.micro * plan.batch.sequence
    once = tokens * 32 * plan.parameter_itemsize * (t - 1) // t
    number = 2 * 4 * tokens * (t - 1) // t
    rows, columns = grid_rows(t), grid_columns(t)
    full = tokens * 32 * plan.parameter_itemsize
    block = 2 * full // columns * (rows - 1) // rows + full // rows * (columns - 1) // columns
    forward = dict.fromkeys(local_layers, block) | {0: 2 * once, graph.layers - 1: once + number}
    backward = dict.fromkeys(local_layers, block) | {0: 2 * once, graph.layers - 1: once}
    recomputed = (at for at in local_layers if is_recomputed(plan, at))
    inside = {
        "forward": plan.batch.accumulation * sum(forward[at] for at in local_layers),
        "recompute": plan.batch.accumulation * sum(forward[at] for at in recomputed),
    }
    if plan.parallel.schedule != "zero-bubble":
        backs = {"backward": plan.batch.accumulation * sum(backward[at] for at in local_layers)}
    else:  # tokens have no gradient, so that the first layer has a weight-gradient pass only
        backs = {
            "backward_input": plan.batch.accumulation
            * sum(backward[at] for at in local_layers if at),
            "backward_weight": plan.batch.accumulation
            * sum(backward[at] for at in local_layers if not at),
        }
    return inside | backs


@given(drawn=distributed_plans())
def test_every_byte_sent_is_received(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    sent = CommunicationVolume(plan, graph)
    pairs = {
        "send": "receive",
        "send_tied_weights": "recv_tied_weights",
        "send_tied_grads": "accumulate_tied_grads",
    }
    totals = dict.fromkeys((*pairs, *pairs.values()), 0)
    for program in lower(plan, graph):
        for kind, layer, micro in program.instructions:
            if kind in pairs:
                totals[kind] += sent.sent_bytes(Instruction(kind, layer, micro))
            elif kind in totals:
                (sender,) = (one for one, other in pairs.items() if other == kind)
                totals[kind] += sent.sent_bytes(Instruction(sender, layer, micro))  # type: ignore[arg-type]
    assert all(totals[one] == totals[other] for one, other in pairs.items())


def sharing(shards: int, **choice: Any) -> Plan:  # noqa: ANN401  handed on to the factory
    return tiny_plan(GRAPH, MACHINE, data=8, sharding=(1, shards), **choice)


@given(
    accumulation=st.integers(1, 4),
    precision=st.sampled_from(["float32", "bfloat16"]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    pipeline=st.integers(1, 3),
)
def test_a_higher_sharding_degree_never_needs_more_device_memory(**choice: Any):  # noqa: ANN401  handed on to the factory
    plans = [sharing(shards, **choice) for shards in (1, 2, 4, 8)]
    peaks = [peak_of(lower(plan, GRAPH), plan, GRAPH) for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


@given(clip=st.booleans(), precision=st.sampled_from(["float32", "bfloat16"]))
def test_a_higher_sharding_degree_offloads_less_state_per_device(**choice: Any):  # noqa: ANN401  handed on to the factory
    phases = ((0, 1), (1, 2), (2, 6))
    offloaded = [
        sum(
            offloaded_bytes_by_tier(
                sharing(shards, offload=HOST_OFFLOAD, phases=phases, **choice), GRAPH
            )["host"].values()
        )
        for shards in (1, 2, 4, 8)
    ]
    assert offloaded == sorted(set(offloaded), reverse=True)


def test_sharded_weights_are_unsharded_and_freed_once_each_step():
    graph, machine = tiny_graph(layers=0, tied=False), tiny_machine(devices=4)
    plan = tiny_plan(graph, machine, data=4, sharding=(2, 4), accumulation=2)
    kinds = [tuple(i)[:2] for i in lower(plan, graph)[0].instructions if i.micro_batch is None]
    assert kinds == [
        ("unshard_weights", 0),
        ("unshard_weights", 1),
        ("free_weights", 1),
        ("reduce_grads", 1),
        ("free_weights", 0),
        ("reduce_grads", 0),
        ("grad_norm", None),
        ("update", 0),
        ("all_gather_params", 0),
        ("update", 1),
        ("all_gather_params", 1),
        ("sync", None),
    ]


def test_a_stage_with_phases_unshards_each_phase_and_updates_at_the_first_prefetch():
    graph = tiny_graph(layers=1, tied=False)
    plan = tiny_plan(
        graph,
        MACHINE,
        offload=HOST_OFFLOAD,
        pipeline=1,
        phases=((0, 1), (1, 3)),
        data=4,
        sharding=(2, 4),
    )
    program = lower(plan, graph)[0]
    assert " ".join(
        f"{i.kind}-{i.layer}" for i in program.instructions if i.micro_batch is None
    ) == (
        "update-1 update-2 unshard_weights-0 free_shard-0 free_weights-0 "
        "all_gather_params-1 all_gather_params-2 unshard_weights-1 free_shard-1 "
        "unshard_weights-2 free_shard-2 prefetch_weights-0 free_weights-2 reduce_grads-2 "
        "offload_grads-2 free_weights-1 reduce_grads-1 offload_grads-1 "
        "unshard_weights-0 free_shard-0 free_weights-0 reduce_grads-0 grad_norm-None "
        "update-0 all_gather_params-0 sync-None"
    )
    assert " ".join(f"{i.kind}-{i.layer}" for i in program.flush_deferred_updates) == (
        "update-1 all_gather_params-1 free_shard-1 update-2 all_gather_params-2 free_shard-2"
    )
