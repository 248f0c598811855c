"""Peak memory of published runs, against what papers print and what must hold."""

from dataclasses import replace
from pathlib import Path

import pytest

from validation.made_tables import run_of
from windlass.validation.laws.gpu_memory import peak_bytes
from windlass.validation.predict_run import predict_runs, run_columns
from windlass.validation.published_run import PublishedRun
from windlass.validation.stack_constants import prior_constants

GIB = 2.0**30
KORTHIKANTI = {
    "22B": ((48, 6144, 64, 4, 8, 1, 1), 59.25, 0.0764),
    "175B": ((96, 12288, 96, 1, 8, 8, 3), 66.84375, 0.0871),
}
"""Layers, width, heads, micro-batch, t, p, interleave; activations without recompute, GiB; and
what full recompute leaves of them. Source: Korthikanti et al. 2022, arXiv:2205.05198, figures 1
and 7."""
PRINTED = {"none": 5e-4, "full": 0.01}
"""The figure's bars of full recompute count a little outside the layers."""


def _activations(run: PublishedRun) -> float:
    """What activations alone add: bare constants, so that all is counted as the paper does."""
    k = {name.removeprefix("memory."): value for name, value in prior_constants(run.stack).items()}
    k |= {"slack": 1.0, "buffers": 0.0, "running": 0.0, "logits": 0.0, "activations": 1.0}
    k |= {"state": 0.0, "gradient_held": 0.0}
    columns = run_columns([run], [run.config])
    layers = run.shape.layers / run.config.pipeline
    held = (
        2.0
        * (layers * run.shape.parameters_per_block + run.shape.vocabulary_parameters)
        / run.config.tensor
    )
    return float(peak_bytes(columns, k)[0]) - k["context"] - held


@pytest.mark.parametrize("model", KORTHIKANTI)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_those_of_korthikanti(tmp_path: Path, model: str, recompute: str):
    (layers, width, heads, micro, t, p, v), kept, left = KORTHIKANTI[model]
    run = run_of(
        tmp_path, layers=layers, hidden=width, heads=heads, microbatch=micro, t=t, p=p, d=1,
        interleave=v, n_devices=t * p, global_batch=64 * micro, recompute=recompute, vocab=1,
    )  # fmt: skip
    running = (
        replace(run, config=replace(run.config, recompute_share=0.0))
        if recompute == "none"
        else run
    )

    expected = kept * (1.0 if recompute == "none" else left)
    mine = _activations(running) / GIB
    if recompute == "full":
        # The paper's figure leaves out the one layer that is being recomputed.
        one_layer = kept / layers / ((1 + (p - 1) / p / v) if v > 1 else 1)
        mine -= one_layer
    assert mine == pytest.approx(expected, rel=PRINTED[recompute])


def test_a_pipelines_first_stage_holds_as_many_micro_batches_as_there_are_stages(tmp_path: Path):
    def peak(accumulation: float) -> float:
        run = run_of(tmp_path, p=8, t=8, d=1, layers=32, recompute="none")
        config = replace(run.config, accumulation=accumulation)
        return predict_runs([replace(run, config=config)])[0].peak_bytes or 0.0

    assert peak(4) < peak(8) == peak(64)


def test_weights_of_zero3_stay_whole_in_a_pipeline(tmp_path: Path):
    run = run_of(tmp_path, p=4, t=8, d=2, layers=32, zero="3", global_batch=64)
    flat = replace(run, config=replace(run.config, pipeline=1.0, replicas=8.0))
    staged, plain = predict_runs([run, flat])

    whole = run.shape.layers / 4 * run.shape.parameters_per_block / 8 * 6.0
    assert (staged.peak_bytes or 0) > whole
    assert (plain.peak_bytes or 0) < (staged.peak_bytes or 0)
