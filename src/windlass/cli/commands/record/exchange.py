"""`windlass mirror`, `import`, `import-runs` and `export`: runs to and from other software."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windlass import api
from windlass.api import AsJson, Flag, Names
from windlass.cli.console import (
    ProgressBars,
    console,
    print_json,
    print_line,
    print_notes,
    print_table,
)


def mirror(
    run: str = "last",
    *,
    to: Names = (),
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Copy a run into other trackers; copying it again adds only what is new.

    For example: `windlass mirror last --to tensorboard:logs --to csv:steps.csv`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        to: Where to, `NAME:PLACE`, several with commas or given several times.
            `tensorboard:FOLDER`, `mlflow:URI`, `wandb:FOLDER` (an offline run, which `wandb sync`
            sends), `trackio:PROJECT`, `csv:FILE`, `parquet:FILE`.
        runs: The folder that holds the run folders.
        as_json: Print the targets as JSON.
    """
    mirrors = api.mirror(run, *to, root=runs)
    if as_json:
        print_json(mirrors)
        return
    for copy in mirrors:
        print_line(f"{copy.target.partition(':')[0]:<12} {copy.place}")


def export(
    run: str = "last",
    *,
    to: str | None = None,
    masks: Path | None = None,
    ema: Flag = False,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a run, in full: absent ones are zeros, adapters are merged.

    For example: `windlass export last --to hf:my-model`, or `windlass export last --to
    weights.safetensors --masks masks.safetensors`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        to: `hf:DIR` for a Hugging Face folder, `gguf:FILE` for llama.cpp, `peft:DIR` for the
            adapters alone (`hf`, `gguf` and `peft` make them in the run folder), or one
            safetensors file.
        masks: The file of the masks of a sparse model, which `sparsity.mask=FILE` starts from.
        ema: Write the averages of the weights that a run with `train.ema` keeps.
        runs: The folder that holds the run folders.
        as_json: Print what was written as JSON.
    """
    exported = api.export(run, to=to, masks=masks, ema=ema, root=runs)
    if as_json:
        print_json(exported)
        return
    if exported.weights is not None:
        print_line(f"weights  {exported.weights}, after step {exported.step}")
    if exported.masks is not None:
        print_line(f"masks    {exported.masks}, of {exported.sparse_layers} layers")


def import_model(folder: Path, *, runs: Path = api.RUNS, as_json: AsJson = False) -> None:
    """Make a run of a Hugging Face folder, to be sampled, evaluated and exported.

    For example: `windlass import smollm2`. To train its weights, name `hf:smollm2` as the model.

    Args:
        folder: A folder with a `config.json` and safetensors.
        runs: The folder that holds the run folders.
        as_json: Print the run's folder as JSON.
    """
    with ProgressBars() as progress:
        run = api.import_model(folder, root=runs, progress=progress)
    if as_json:
        print_json({"run": run})
        return
    print_line(f"run     {run}")
    print_line(f"train   windlass train {shlex.quote(f'hf:{folder}')}")


def import_runs(
    source: Path,
    *,
    tracker: Annotated[str | None, Parameter(name="--from")] = None,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Take over runs of MLflow, TensorBoard, Trackio or W&B; twice changes nothing.

    For example: `windlass import-runs mlflow.db`, or `windlass import-runs lightning_logs`.

    Args:
        source: A file or folder of theirs; folders are searched.
        tracker: `mlflow`, `tensorboard`, `trackio` or `wandb`; all that the source holds if not
            given.
        runs: The folder that holds the run folders.
        as_json: Print the runs as JSON.
    """
    imported = api.import_runs(source, tracker=tracker, root=runs)
    if as_json:
        rows = [
            {
                "folder": item.folder,
                "id": item.run.id,
                "change": item.change,
                "tracker": item.run.origin,
                "origin_id": item.run.origin_id,
                "rows": item.rows,
            }
            for item in imported.runs
        ]
        print_json(
            {"runs": rows, "left_out": imported.left_out, "warnings": list(imported.warnings)}
        )
        return
    changes = [item for item in imported.runs if item.change != "unchanged"]
    if changes:
        print_table(
            ("run", "from", "state", "rows", "name"),
            (
                (
                    item.folder.name,
                    item.run.origin,
                    item.run.state or "going on",
                    str(item.rows),
                    item.run.name,
                )
                for item in changes
            ),
        )
    console.print(
        f"{imported.count('new')} new, {imported.count('changed')} changed and "
        f"{imported.count('unchanged')} unchanged runs in `{runs}`"
    )
    if imported.left_out:
        parts = ", ".join(f"{count} {what}" for what, count in imported.left_out.items())
        print_notes([f"not taken over: {parts}"])
    print_notes(imported.warnings)
