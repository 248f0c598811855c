"""A first plan of this machine measures what it needs, and later ones what they need beside it."""

from pathlib import Path

import pytest
import torch

from factories import catalog_graph, tiny_graph, tiny_machine, tiny_plan
from windlass import api
from windlass.experiments.sweeping.trial_plan import measured_machine
from windlass.hardware.local_machine import save_local_machine, system_fingerprint
from windlass.hardware.probe.matmul import converted_precisions
from windlass.jobs.known_machines import (
    EVERY_PART,
    attention_parts,
    needed_parts,
    parts_of_plan,
)
from windlass.jobs.planned import make_request


@pytest.mark.parametrize(
    ("overrides", "seconds", "parts"),
    [
        ((), 60.0, ()),
        ((), 3600.0, ("compiled code", "heads of 64")),
        (("compile=false",), 3600.0, ()),
        (("compile=true",), 0.0, ("compiled code", "heads of 64")),
        (("sparsity.level=0.5", "precision=float16"), 1.0, ("sparse products", "float16")),
        (("attention=math",), 1.0, ("heads of 64",)),
    ],
)
def test_a_request_needs_only_what_its_plans_are_made_of(
    overrides: tuple[str, ...], seconds: float, parts: tuple[str, ...]
):
    request, without_attention = make_request("gpt-tiny", *overrides), tiny_graph()
    assert needed_parts(request, without_attention, seconds) == parts


@pytest.mark.parametrize(
    ("model", "dials", "parts"),
    [
        ("gpt-tiny", {}, {"heads of 32"}),
        ("gpt2-124m", {}, {"heads of 64"}),
        ("gpt2-124m", {"heads": 8, "width": 640}, {"heads of 64", "heads of 128"}),
        ("gpt2-124m", {"heads": 2, "width": 20}, {"heads of 16"}),
        ("bert-base", {}, {"heads of 64", "attention without a mask"}),
    ],
)
def test_a_model_needs_attention_in_its_own_heads_or_those_beside_them(
    model: str, dials: dict[str, float], parts: set[str]
):
    assert attention_parts(catalog_graph(model, **dials)) == parts


def test_a_sweep_measures_nothing_that_its_trials_do_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unused = tuple(part for part in EVERY_PART if part != "heads of 32")
    here = tiny_machine().model_copy(
        update={"name": "here", "system": system_fingerprint(), "unmeasured": unused}
    )
    save_local_machine(tmp_path / "windlass", here)
    tiny = ("model.layers=2", "train.sequence=64", "train.batch=4", "data.limit_bytes=300000")
    asked = api.make_sweep_request(
        "gpt-tiny", *tiny, "train.steps=4,8", "train.learning_rate=1e-3,1e-2"
    )
    assert measured_machine(asked, None).unmeasured == unused


def test_a_plan_needs_what_it_computes_with():
    plan = tiny_plan(tiny_graph(), tiny_machine()).model_copy(update={"precision": "float16"})
    assert parts_of_plan(plan, tiny_graph()) == ("float16",)


@pytest.mark.slow
def test_parts_are_measured_when_a_plan_asks_and_change_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = api.plan("gpt-tiny", "train.steps=5")
    assert set(EVERY_PART) - set(first.machine.unmeasured) == {"heads of 32"}
    assert not first.plan.compile
    assert any("compiled code is left out" in note for note in first.notes)

    sparse = api.plan("gpt-tiny", "train.steps=5", "sparsity.level=0.5", "sparsity.block=16")
    assert set(first.machine.unmeasured) - set(sparse.machine.unmeasured) == {"sparse products"}
    compiled = api.plan("gpt-tiny", "train.steps=5", "compile=true")

    now = set(sparse.machine.unmeasured) - set(compiled.machine.unmeasured)
    assert now == {"compiled code", "heads of 64"}
    assert compiled.prediction.compile_seconds > 1
    assert not compiled.notes
    rates = {rate.precision: rate for rate in compiled.machine.device.matmul}
    converted = converted_precisions(torch.device("cpu"))
    for old in first.machine.device.matmul:
        new = rates[old.precision]
        assert (old.curve, old.products) == (new.curve, new.products)
        assert new.attention_rates[: len(old.attention_rates)] == old.attention_rates
        assert bool(new.sparse_products) == (old.precision not in converted)
