"""What `windlass plan` says of sparse weights: predicted speed-up and Amdahl's limit."""

from pathlib import Path

import pytest

import windlass
from factories import tiny_machine
from windlass.api.compare import sparse_speedup
from windlass.errors import RequestError

SPARSE = ("sparsity.level=0.5", "sparsity.block=32")
SIZES = ("train.batch=8", "train.sequence=128", "train.steps=10")


def test_on_a_machine_that_states_no_efficiency_a_sparse_plan_is_as_fast_as_its_limit(
    tmp_path: Path,
):
    machine = tmp_path / "tiny.toml"
    tiny_machine().save(machine)
    planned = windlass.plan("gpt-tiny", *SIZES, *SPARSE, machine=str(machine), cache=False)
    speedup = sparse_speedup(planned)
    assert speedup is not None
    assert speedup.speedup == speedup.limit

    dense = windlass.plan(
        "gpt-tiny", *SIZES, machine=str(machine), plan=planned.plan.model_copy(
            update={"graph": windlass.plan("gpt-tiny", *SIZES, machine=str(machine)).plan.graph,
                    "model": None}
        ),
    )  # fmt: skip
    assert speedup.dense_seconds == pytest.approx(dense.prediction.step_seconds)
    # Attention, the head, norms and what lies between them take as long as before.
    assert 1 < speedup.limit < 2


def test_published_kernels_stay_below_the_limit_and_blocks_of_128_come_near_it():
    wide = ("model.width=1024", "model.heads=8", *SIZES, "sparsity.level=0.75")
    found = {
        block: sparse_speedup(
            windlass.plan(
                "gpt-tiny", *wide, f"sparsity.block={block}", "precision=bfloat16",
                machine="a100-80gb", cache=False,
            )
        )
        for block in (32, 128)
    }  # fmt: skip
    small, large = found[32], found[128]
    assert small is not None
    assert large is not None
    assert small.speedup < large.speedup < large.limit
    assert large.limit == pytest.approx(small.limit, rel=0.01)


def test_dense_weights_have_no_speed_up():
    assert sparse_speedup(windlass.plan("gpt-tiny", *SIZES, machine="a100-80gb")) is None


def test_other_software_trains_no_sparse_weights():
    with pytest.raises(RequestError, match="trains no sparse weights"):
        windlass.plan("gpt2-355m", *SPARSE, machine="dgx-a100-80gb", stack="megatron-core")
