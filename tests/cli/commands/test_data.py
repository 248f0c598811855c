"""`windlass data`: what a text holds, before a model is trained on it."""

import json
from pathlib import Path

from command_line import Windlass


def test_sources_shares_and_the_held_out_text_are_counted(
    windlass: Windlass, tmp_path: Path
) -> None:
    for name, text in (("a", "one two\n"), ("b", "three four\n")):
        (tmp_path / f"{name}.txt").write_text(text * 400, encoding="utf-8")
    (tmp_path / "val.txt").write_text("five six\n" * 300, encoding="utf-8")
    words = ("a.txt", "b.txt", "data.weights=[3, 1]", "data.validation=val.txt")
    done = windlass("data", *words, "data.tokenizer=byte", "--json")
    statistics = json.loads(done.stdout)
    sources = statistics["meta"]["train"]["sources"]
    assert [(part["source"], part["nbytes"]) for part in sources] == [
        ("a.txt", 3200), ("b.txt", 4400)
    ]  # fmt: skip
    assert statistics["shares"] == [0.75, 0.25]
    assert statistics["meta"]["held_out"]["nbytes"] == 2700


def test_sources_that_do_not_exist_are_named_at_once(windlass: Windlass) -> None:
    done = windlass("data", "no.txt", "nor.txt")
    assert done.returncode == 2
    assert done.stderr.count("no file or folder") == 2
