"""Runs on IPU pods as plans: their stages, and published times of steps."""

from pathlib import Path

import pytest

import windlass
from validation.made_tables import BERT, run_of
from windlass.stacks import load_stack
from windlass.validation.csv_table import UnusableRow
from windlass.validation.ipu_runs import stage_halves
from windlass.validation.published_plan import published_plan, step_seconds
from windlass.validation.published_run import PublishedRun

ASKED = 0.05
"""Largest error of a published run, and of growth with a pod's size."""
PACKED = "avg_seq_per_pack=2; layer placement (att_ffn_placement or layers_per_ipu)="
POD16 = (
    PACKED + "[[1, [7, 6]], [2, [6, 7]], [3, [7, 6]], [0, [4, 5]]]; optimizer_state_offchip=True"
)
POD128 = PACKED + (
    "[[1, [2, 2]], [2, [3, 3]], [3, [4, 3]], [4, [3, 4]], [5, [4, 3]], [6, [3, 4]], "
    "[7, [4, 3]], [0, [1, 2]]]; optimizer_state_offchip=False"
)
BOW = {"device": "Graphcore Bow IPU", "p": "8", "microbatch": "3"}
PAGE = {
    **BERT, "source": "https://www.graphcore.cn/performance-results/", "p": "", "d": "",
    "microbatch": "", "device": "Graphcore Bow IPU",
}  # fmt: skip


def predicted(run: PublishedRun) -> float:
    return step_seconds(published_plan(run, run.config))


def test_blocks_go_around_the_ipus_and_end_beside_the_head_on_the_first():
    assert stage_halves("layers_per_ipu)=[3, 7, 7, 7]", 24, 4) == (14, 14, 14, 6)
    assert stage_halves(POD16, 24, 4) == (13, 13, 13, 9)


def test_without_a_placement_the_stage_of_the_head_is_shorter():
    assert stage_halves("", 24, 4) == (14, 14, 14, 6)
    assert stage_halves("", 24, 8) == (7, 7, 7, 7, 7, 7, 6, 0)


def test_a_placement_of_other_blocks_is_refused():
    with pytest.raises(UnusableRow, match="placement of 24 blocks on 4 stages, but 24 layers and"):
        stage_halves(POD16, 24, 8)


def test_a_row_of_the_vendors_page_ran_the_vendors_application(tmp_path: Path):
    base = run_of(tmp_path, PAGE, model="bert-base", layers=12, hidden=768, heads=12, seq=128,
                  global_batch=65536)  # fmt: skip
    squad = run_of(tmp_path, PAGE, seq=384, global_batch=256, notes="fine-tune SQuAD SL384")

    config = base.config
    assert (config.pipeline, config.micro, config.accumulation) == (4, 32, 512)
    assert config.stage_halves == (8, 8, 8, 0)
    assert config.optimizer_off_chip
    config = squad.config
    assert (config.pipeline, config.replicas, config.micro, config.accumulation) == (8, 2, 4, 32)


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"notes": POD16, "grad_accum": 192, "zero": "RTS"}, 2.01151),
        ({"notes": POD128, "grad_accum": 96, "n_devices": 128, "p": 8, "d": 16,
          "global_batch": 6144}, 0.68344),
        ({**BOW, "grad_accum": 256, "d": 2}, 1.3305),
        ({**BOW, "grad_accum": 96, "n_devices": 64, "d": 8, "global_batch": 4608}, 0.61791),
    ],
)  # fmt: skip
def test_published_steps_on_pods_are_predicted(
    changes: dict[str, object], measured: float, tmp_path: Path
):
    """Source: MLPerf Training v1.1 and v2.0, Graphcore; constants were fitted to other rows."""
    run = run_of(tmp_path, BERT, measured_step_s=measured, **changes)

    assert predicted(run) == pytest.approx(measured, rel=ASKED)


def test_throughput_grows_with_the_pod_as_published(tmp_path: Path):
    """Source: MLPerf Training v2.0, Graphcore: Bow pods of 16 and 256 with their configurations."""
    placed = PACKED + (
        "[[1, [3, 3]], [2, [3, 3]], [3, [3, 3]], [4, [4, 3]], [5, [3, 4]], [6, [4, 3]], "
        "[7, [3, 4]], [0, [1, 1]]]"
    )
    pod = {**BERT, **BOW, "notes": placed}
    few = run_of(tmp_path, pod, grad_accum=256, d=2)
    many = run_of(tmp_path, pod, grad_accum=36, n_devices=256, d=32, global_batch=6912)

    growth = 6912 / predicted(many) / (3072 / predicted(few))
    assert growth == pytest.approx(19072 / 2304, rel=ASKED)


def test_wafers_stream_one_layer_after_the_other(tmp_path: Path):
    """Source: Argonne's user guide, log of 2025-10-10 of GPT-J on one CS-3."""
    run = run_of(
        tmp_path, source="argonne", model="gpt-j-6b", layers=28, hidden=4096, heads=16, seq=2048,
        vocab=50400, global_batch=120, microbatch="", t=1, p=1, d=1, device="Cerebras CS-3 (WSE-3)",
        n_devices=1, measured_step_s=2.6816,
    )  # fmt: skip

    published = published_plan(run, run.config)

    assert published.plan.offload.parameters == "memoryx"
    assert len(published.plan.stages[0].phases) == 30
    assert step_seconds(published) == pytest.approx(2.6816, rel=load_stack("modelzoo").deviation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pins", "most_seconds"),
    [
        # Published: a POD256 holds tens of billions of parameters in its processors' memory.
        ("gpt-neox-20b", ("phases=1", "parallel.pipeline=16", "parallel.tensor=4x4"), 10),
        # 37.9 s in one stage of 8x8 ranks, whose layers take turns.
        ("gpt3-175b", ("parallel.pipeline=2", "parallel.tensor=4x8", "parallel.data=4"), 30),
    ],
)
def test_a_pod_of_256_trains_what_its_maker_says(
    model: str,
    pins: tuple[str, ...],
    most_seconds: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    phases = "phases=1" in pins
    tier = ("offload.optimizer=streaming",) if phases else ("batch.micro=1",)
    batch = f"train.batch={256 if phases else 128}"

    planned = windlass.plan(model, batch, *tier, *pins, machine="ipu-pod256")

    assert planned.plan.is_offloaded("parameters") is not phases
    assert planned.prediction.fits
    assert planned.prediction.step_seconds < most_seconds
