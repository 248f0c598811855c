"""A first plan of this machine measures what it needs, and later ones what they need beside it."""

from pathlib import Path

import pytest

from windlass import api
from windlass.api.machines import EVERY_PART, needed_parts
from windlass.api.plan import make_request


@pytest.mark.parametrize(
    ("overrides", "seconds", "parts"),
    [
        ((), 60.0, ()),
        ((), 3600.0, ("compiled code",)),
        (("compile=false",), 3600.0, ()),
        (("compile=true",), 0.0, ("compiled code",)),
        (("sparsity.level=0.5", "precision=float16"), 1.0, ("sparse products", "float16")),
    ],
)
def test_a_request_needs_only_what_its_plans_are_made_of(
    overrides: tuple[str, ...], seconds: float, parts: tuple[str, ...]
):
    assert needed_parts(make_request("gpt-tiny", *overrides), seconds) == parts


@pytest.mark.slow
def test_parts_are_measured_when_a_plan_asks_and_change_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = api.plan("gpt-tiny", "train.steps=5")
    assert first.machine.unmeasured == EVERY_PART
    assert not first.plan.compile
    assert any("compiled code is left out" in note for note in first.notes)

    sparse = api.plan("gpt-tiny", "train.steps=5", "sparsity.level=0.5", "sparsity.block=16")
    assert sparse.machine.unmeasured == ("compiled code", "float16")
    compiled = api.plan("gpt-tiny", "train.steps=5", "compile=true")

    assert compiled.machine.unmeasured == ("float16",)
    assert compiled.prediction.compile_seconds > 1
    assert not compiled.notes
    rates = {rate.precision: rate for rate in compiled.machine.device.matmul}
    for old in first.machine.device.matmul:
        new = rates[old.precision]
        assert (old.curve, old.products) == (new.curve, new.products)
        assert new.attention_rates[: len(old.attention_rates)] == old.attention_rates
        assert bool(new.sparse_products) == bool(old.products)
