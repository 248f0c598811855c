"""A fault that is injected into a run is found, and the layer that it is in is named."""

import pytest

from factories import tiny_plan
from rank_pool import BATCH, MACHINE, SEQUENCE, RankPool, slow
from windlass.runtime.verify.fault_injection import FAULTS, faulty_layer
from windlass.schema.tensor_grid import TensorGrid

PARALLELISM = {
    "sharded": {"data": 4, "sharding": (2, 4), "pipeline": 1},
    "pipeline-tensor": {"pipeline": 2, "tensor": 2, "micro": 2, "accumulation": BATCH // 2},
    "grid": {"tensor": TensorGrid(2, 2), "micro": 4, "accumulation": BATCH // 4},
    "pipeline-data": {"pipeline": 2, "data": 2},
    "context": {"context": 2},
}
"""Degrees of parallelism, in one of which each fault is possible, and sizes of micro-batches."""


@pytest.mark.parametrize(
    ("fault", "parallelism"),
    [
        ("loss-scale", "pipeline-data"), ("micro-batch", "pipeline-data"),
        ("update", "pipeline-tensor"), ("reduction", "pipeline-data"), slow("reduction", "sharded"),
        slow("reduction", "context"),
        ("samples", "pipeline-data"), ("shards", "sharded"), ("gather", "sharded"),
        ("tensor-reduce", "pipeline-tensor"), slow("tensor-reduce", "grid"),
        ("tied-gradient", "pipeline-tensor"),
    ],
)  # fmt: skip
def test_an_injected_fault_is_found_and_its_layer_named(
    pool: RankPool, fault: str, parallelism: str
) -> None:
    chosen = {"micro": 1, **PARALLELISM[parallelism]}
    chosen.setdefault("accumulation", BATCH // chosen.get("data", 1))
    plan = tiny_plan(pool.graph, MACHINE, sequence=SEQUENCE, precision="float64", **chosen)
    assert FAULTS[fault].is_possible(plan, pool.graph)
    result, _ = pool.verify(plan, fault)
    assert result.first_mismatch is not None
    if FAULTS[fault].single_layer:
        assert result.first_mismatch.layer == faulty_layer(plan)


def test_every_fault_is_injected_by_a_fast_test() -> None:
    marks = test_an_injected_fault_is_found_and_its_layer_named.pytestmark
    quick = {each[0] for each in marks[0].args[1] if not hasattr(each, "marks")}
    assert quick == set(FAULTS)
