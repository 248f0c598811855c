"""`windlass recipe`: lists, plans and runs experiments of the field."""

import json
from pathlib import Path

import pytest

from command_line import Windlass
from windlass.cli.console import console
from windlass.cli.main import main

SMALL = (
    "model.width=128", "model.heads=4", "train.steps=16", "train.batch=2", "train.sequence=32",
    "train.evaluate_sequences=4", "compile=false", "sparsity.block=16", "data.limit_bytes=2MB",
    "data.held_out=0.2",
)  # fmt: skip


def test_all_recipes_are_listed_with_their_scales(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipe"])
    assert "sparse-then-dense" in capsys.readouterr().out

    main(["recipe", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert listed["sparse-then-dense"]["scales"] == ["tiny", "full"]
    assert {"bert-large", "gpt-depth", "llama"} < set(listed)


def test_a_recipe_is_printed_and_planned_for_a_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", 200)  # so that no head of the table is broken
    main(["recipe", "gpt-depth=12", "--scale", "full"])
    printed = capsys.readouterr().out
    assert "model.width=768" in printed
    assert "predicted" not in printed

    main(["recipe", "bert-large"])
    printed = capsys.readouterr().out
    assert "compile=false" in printed
    assert "data.packing=true" in printed

    main(["recipe", "llama", "--on", "h100"])
    planned = capsys.readouterr().out
    assert "a step, predicted" in planned
    assert "predicted  " in planned


def test_what_is_no_recipe_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words, reason in (
        (("sparse-then-dens",), "did you mean `sparse-then-dense`?"),
        (("sparse-then-dense", "--scale", "large"), "it has `tiny` and `full`"),
        (("--run", str(tmp_path)), "need a recipe"),
        (("llama", "--on", "h100", "--run", str(tmp_path)), "leave out `--on`"),
        (("sparse-then-dense", "--on", "h100"), "leave out `--on`"),
        (("llama", "--run", str(tmp_path), "--seeds", "0"), "at least 1"),
        (("sparse-then-dense", "--run", str(tmp_path), "--seeds", "0"), "at least 1"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["recipe", *words])
        assert end.value.code == 2
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_recipe_runs_to_its_page_and_nothing_twice(windlass: Windlass, tmp_path: Path) -> None:
    planned = windlass("recipe", "sparse-then-dense", *SMALL)
    assert planned.returncode == 0, planned.stderr
    assert "predicted" in planned.stdout
    assert "for the steps of 12 runs, 3 seeds of each arm" in planned.stdout

    words = ("recipe", "sparse-then-dense", *SMALL, "--seeds", "1", "--run", "parity")
    done = windlass(*words)

    assert done.returncode == 0, done.stderr
    assert "At equal tokens " in done.stdout
    page = (tmp_path / "parity" / "recipe.html").read_text()
    assert page.count("<svg") == 3
    runs = sorted(path.name for path in (tmp_path / "parity").glob("sparse-then-dense-tiny-*"))
    assert len(runs) == 4
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "parity").rglob("*.bin")}
    again = windlass(*words)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-8:] == done.stdout.splitlines()[-8:]
    assert before == {path: path.stat().st_mtime_ns for path in before}
