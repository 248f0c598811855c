"""Memory on other stacks: what the search counts in arrays is what a prediction says."""

import itertools

import numpy as np
import pytest

from windlass.capture import stack_graph
from windlass.cost import ArrayClock, PlanColumns, stack_stage_bytes
from windlass.hardware import load_machine
from windlass.models import apply_model_arguments, model_config
from windlass.program import with_recompute
from windlass.schema import Batch, Parallelism, Plan, ShardingDegrees, Stage
from windlass.stacks import load_stack


@pytest.mark.parametrize("name", ["nemo", "torchtitan"])
def test_bytes_in_arrays_are_those_of_the_plan(name: str) -> None:
    stack = load_stack(name)
    machine = load_machine("dgx-h100").model_copy(update={"stack": stack})
    config = apply_model_arguments(model_config("llama3-8b"), {"layers": 6})
    graph = stack_graph(config, stack, (2,))
    shards = {"nemo": (1, None), "torchtitan": (4, True)}
    parameters, reshard = shards[name]
    for chunks, tensor, micro, (full, selective) in itertools.product(
        (1, 2), (1, 2), (1, 4), ((0, 0), (1, 0), (0, 2), (1, 1))
    ):
        plan = with_recompute(
            Plan(
                graph=graph.label,
                machine=machine.label,
                stack=name,
                precision="bfloat16",
                parallel=Parallelism(
                    pipeline=2, tensor=tensor, data=2, context=2, virtual_stages=chunks,
                    schedule="interleaved" if chunks > 1 else "1f1b",
                ),
                sharding=ShardingDegrees(parameters=parameters, optimizer=4, reshard=reshard),
                batch=Batch(sequence=8192, micro=micro, accumulation=4),
                stages=tuple(
                    Stage(phases=((8 * at // (2 * chunks), 8 * (at + 1) // (2 * chunks)),))
                    for at in range(2 * chunks)
                ),
            ),
            [full] * 2 * chunks,
            [selective] * 2 * chunks,
        )  # fmt: skip

        stages = stack_stage_bytes(plan, graph, machine)
        (counted,) = ArrayClock(plan, graph, machine).least_bytes(PlanColumns.of([plan]))

        np.testing.assert_allclose(counted, [sum(each.values()) for each in stages], rtol=1e-9)
