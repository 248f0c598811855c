"""The outcome of a search is kept, and the same question is answered from it."""

from pathlib import Path

import pytest

from windlass import api
from windlass.atomic_files import cache_folder
from windlass.cost import CompiledCode
from windlass.jobs.kept_results import load_kept_plan, plan_key

SMALL = (
    "train.batch=8", "model.layers=2", "compile=false", "recompute=none", "phases=1",
    "precision=float32",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def files() -> list[Path]:
    return sorted((cache_folder() / "plans").glob("*"))


def test_the_same_question_has_the_same_answer_without_a_search():
    first = api.plan("gpt-tiny", *SMALL, machine="h100")

    again = api.plan("gpt-tiny", *SMALL, machine="h100")

    assert (first.is_kept, again.is_kept) == (False, True)
    assert (again.result, again.request, again.defaults) == (
        first.result, first.request, first.defaults,
    )  # fmt: skip
    assert api.forecast(again).timeline == api.forecast(first).timeline
    assert not api.plan("gpt-tiny", *SMALL, machine="h100", cache=False).is_kept


@pytest.mark.parametrize(
    ("memory", "batch"),
    [("120MiB", None), ("1.62GiB", 4)],  # nothing fits; only a smaller default batch does
)
def test_advice_and_a_lowered_default_batch_are_kept_too(memory: str, batch: int | None):
    first, again = (api.plan("gpt-tiny", machine="a100-40gb", memory=memory) for _ in range(2))

    assert again.is_kept
    assert (again.result, again.request) == (first.result, first.request)
    assert again.result.fits is (batch is not None)
    assert batch is None or again.request.train.batch == batch


def test_another_question_is_another_key():
    planned = api.plan("gpt-tiny", *SMALL, machine="h100")
    graph, machine = planned.graph, planned.machine
    faster = machine.model_copy(
        update={"device": machine.device.model_copy(update={"launch_seconds": 1e-9})}
    )
    no_code, own = frozenset[CompiledCode](), CompiledCode.of(planned.plan)
    keys = [
        plan_key(request, graph, where, code)
        for where, code in ((machine, no_code), (faster, no_code), (machine, frozenset([own])))
        for request in (
            api.make_request("gpt-tiny"),
            api.make_request("gpt-tiny", "moments=float32"),  # a pin that equals the default
            api.make_request("gpt-tiny", "train.batch=9"),
        )
    ]
    assert len(set(keys)) == 9


def test_a_damaged_file_is_made_anew():
    first = api.plan("gpt-tiny", *SMALL, machine="h100")
    (file,) = files()
    content = file.read_bytes()
    for damage in (b"", b"{", b"\xff", content.replace(b'"evaluated":', b'"evaluated":1')):
        file.write_bytes(damage)

        assert load_kept_plan(file.stem) is None
        anew = api.plan("gpt-tiny", *SMALL, machine="h100")

        assert not anew.is_kept
        assert anew.result == first.result
        assert file.read_bytes() == content


def test_a_model_that_no_file_holds_is_not_kept():
    from torch import nn

    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    for _ in range(2):
        planned = api.plan(model, "train.batch=2", "train.sequence=16", "phases=1", machine="h100")
        assert not planned.is_kept
    assert files() == []
