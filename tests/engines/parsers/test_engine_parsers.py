"""Engines accept what is exported to them, by their own parsers in their own environments."""

import json
import subprocess
from pathlib import Path

import pytest

from engine_plans import engine_plans, facts_of
from windlass.engines import load_engine, translate

ROOT = Path(__file__).parents[3]
PARSERS = {
    "torchtitan": ("torchtitan", "torchtitan_parser"),
    "megatron-lm": ("megatron-core", "megatron_parser"),
}

pytestmark = [pytest.mark.engines, pytest.mark.slow]


@pytest.mark.parametrize("engine", list(PARSERS))
def test_an_engines_own_parser_reads_in_every_export_what_the_plan_says(
    engine: str, tmp_path: Path
) -> None:
    environment, script = PARSERS[engine]
    python = ROOT / ".venv-engines" / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"`make engines` installs {environment}")
    facts = [facts_of(plan) for plan in engine_plans(engine)]
    files = [tmp_path / f"{index}.args" for index in range(len(facts))]
    for file, plan in zip(files, facts, strict=True):
        file.write_text(translate(plan, load_engine(engine)).files["train.args"])

    run = subprocess.run(
        (python, Path(__file__).with_name(f"{script}.py"), *files),
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    parsed = [json.loads(line[7:]) for line in run.stdout.splitlines() if line[:6] == "PARSED"]
    assert len(parsed) == len(facts), run.stderr[-3000:]
    modes = {"none": "NoneType", "full": "FullAC.Config", "selective": "SelectiveAC.Config"}
    for plan, read in zip(facts, parsed, strict=True):
        stages = plan["stages"]
        said = {**plan, "recompute": modes[str(plan["recompute"])], "unknown": []}
        said["parts"] = len(stages) if isinstance(stages, tuple) else 1
        assert read == {key: said[key] for key in read}
