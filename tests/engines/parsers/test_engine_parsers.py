"""Engines accept what is exported to them, by their own parsers in their own environments."""

import json
import subprocess
from pathlib import Path

import pytest

from engine_plans import engine_plans, facts_of
from windlass.engines import load_engine, translate

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = {"megatron-lm": "megatron-core"}
PARSERS = {
    "torchtitan": "torchtitan_parser", "megatron-lm": "megatron_parser",
    "deepspeed": "deepspeed_parser", "automodel": "automodel_parser",
}  # fmt: skip

pytestmark = [pytest.mark.engines, pytest.mark.slow]


@pytest.mark.parametrize("engine", list(PARSERS))
def test_an_engines_own_parser_reads_in_every_export_what_the_plan_says(
    engine: str, tmp_path: Path
) -> None:
    environment = ENVIRONMENTS.get(engine, engine)
    python = ROOT / ".venv-engines" / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"`make engines` installs {environment}")
    file = load_engine(engine)
    facts = [facts_of(plan) for plan in engine_plans(engine)]
    suffix = Path(file.main_file).suffix
    paths = [tmp_path / f"{index}{suffix}" for index in range(len(facts))]
    for path, plan in zip(paths, facts, strict=True):
        path.write_text(translate(plan, file).files[file.main_file])

    run = subprocess.run(
        (python, Path(__file__).with_name(f"{PARSERS[engine]}.py"), *paths),
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


def test_accelerate_reads_in_every_export_what_the_plan_says(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    file = load_engine("accelerate")

    for plan in map(facts_of, engine_plans("accelerate")):
        path = tmp_path / "accelerate.yaml"
        path.write_text(translate(plan, file).files["accelerate.yaml"])
        read = config_args.ClusterConfig.from_yaml_file(str(path))
        degrees = {
            name.removeprefix("parallelism_config_"): value
            for name, value in read.parallelism_config.items()
        }
        parallelism = pytest.importorskip("accelerate").ParallelismConfig(**degrees)
        assert parallelism.total_size == plan["parallel.ranks"] == read.num_processes
        assert parallelism.tp_size == plan["parallel.tensor"]
        assert read.fsdp_config["fsdp_reshard_after_forward"] == plan["sharding.reshard"]


def test_transformers_reads_in_every_export_what_the_plan_says() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.distributed.configuration_utils import DistributedConfig

    file = load_engine("transformers")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)

    for plan in map(facts_of, engine_plans("transformers")):
        files = translate(plan, file).files
        arguments = json.loads(files["training_args.json"])
        (read,) = parser.parse_dict(arguments | {"use_cpu": True})
        degrees = DistributedConfig(**json.loads(files["distributed.json"]))
        ranks = degrees.tp_size * degrees.fsdp_size * degrees.dp_replicate_size
        assert ranks == plan["parallel.ranks"]
        assert read.per_device_train_batch_size == plan["batch.micro"]
        assert read.activation_checkpointing == (plan["recompute"] == "full")
