"""Writes two small runs with each of MLflow, TensorBoard, Trackio and W&B, and what they logged.

    PYTHON tests/integrations/make_peer_runs.py FOLDER

PYTHON needs `mlflow`, `tensorboard`, `trackio` and `wandb`, and nothing of Windlass. The files in
`tests/integrations/data` were made by it; `mlflow.db` and the Trackio project are kept compressed.
"""

import json
import math
import os
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

CONFIG = {
    "model": "tiny <script>alert(1)</script>",
    "optimizer": {"lr": 0.1 + 0.2, "betas": [0.9, 0.95]},
    "steps": 30,
    "amp": True,
}
TAGS = ("baseline", "=cmd()")


def rows(seed: int) -> list[tuple[int, dict[str, float]]]:
    """Steps and values: a gap in the steps, a sparse series, NaN, infinity, a tiny number."""
    result: list[tuple[int, dict[str, float]]] = []
    for step in [*range(20), *range(25, 30)]:
        values = {"loss": math.exp(-step / 7) + seed / 3, "train/lr": 1e-3 / (step + 1)}
        if step % 10 == 0:
            values["eval/loss"] = math.pi * seed + step
        if step == 7:
            values["loss"] = math.nan
        if step == 8:
            values["loss"] = math.inf
        if step == 9:
            values["loss"] = 5e-324
        result.append((step, values))
    return result


def write_mlflow(folder: Path) -> None:
    """Both runs in `mlflow.db`; the second one failed."""
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.create_experiment("exp '; --", artifact_location="file:///artifacts")
    for seed, state in ((1, "FINISHED"), (2, "FAILED")):
        run = client.create_run(experiment, run_name=f"run {seed}", start_time=1_700_000_000_000)
        metrics = [
            Metric(name, value, 1_700_000_000_123 + 1000 * step, step)
            for step, values in rows(seed)
            for name, value in values.items()
        ]
        flat = {"model": CONFIG["model"], "optimizer.lr": str(0.1 + 0.2), "steps": "30"}
        client.log_batch(
            run.info.run_id,
            metrics=metrics,
            params=[Param(key, str(value)) for key, value in flat.items()],
            tags=[RunTag("team", "=cmd()")],
        )
        client.set_terminated(run.info.run_id, state, end_time=1_700_000_100_000)


def write_tensorboard(folder: Path) -> None:
    """One event file for each run; the values are float32 there."""
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for seed in (1, 2):
        writer = EventFileWriter(str(folder / "tensorboard" / f"run{seed}"))
        for step, values in rows(seed):
            for name, value in values.items():
                if seed == 1:  # as torch's SummaryWriter writes it
                    item = summary_pb2.Summary.Value(tag=name, simple_value=value)
                else:  # as TensorFlow 2 and Keras write it
                    item = summary_pb2.Summary.Value(
                        tag=name, tensor=tensor_pb2.TensorProto(dtype=1, float_val=[value])
                    )
                    item.metadata.plugin_data.plugin_name = "scalars"
                summary = summary_pb2.Summary(value=[item])
                when = 1_700_000_000.123 + step
                writer.add_event(event_pb2.Event(wall_time=when, step=step, summary=summary))
        text = summary_pb2.Summary.Value(
            tag="note", tensor=tensor_pb2.TensorProto(dtype=7, string_val=[b"no number"])
        )
        text.metadata.plugin_data.plugin_name = "text"
        writer.add_event(event_pb2.Event(step=1, summary=summary_pb2.Summary(value=[text])))
        writer.close()


def write_trackio(folder: Path) -> None:
    """Both runs in one project."""
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    import trackio

    for seed in (1, 2):
        trackio.init(
            project="peers",
            name=f"run {seed}",
            config=CONFIG,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        for step, values in rows(seed):
            trackio.log(values, step=step)
        trackio.log({"note": "no number"}, step=30)
        trackio.finish()


def write_wandb(folder: Path) -> None:
    """Two offline runs; the second one failed."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    for seed, code in ((1, 0), (2, 1)):
        run = wandb.init(
            project="peers",
            name=f"run {seed}",
            group="pair",
            tags=TAGS,
            notes="one of two",
            config=CONFIG,
            mode="offline",
            dir=str(folder),
            settings=wandb.Settings(
                x_disable_stats=True,
                x_disable_meta=True,
                disable_git=True,
                disable_code=True,
                console="off",
                save_code=False,
            ),
        )
        for step, values in rows(seed):
            run.log(values, step=step)
        run.log({"note": "no number"}, step=30)
        run.finish(exit_code=code)


def expected(*, float32: bool) -> Mapping[str, object]:
    """Series of each run by name: pairs of a step and the value's hexadecimal form."""
    narrow = struct.Struct("<f")
    runs: dict[str, dict[str, list[tuple[int, str]]]] = {}
    for seed in (1, 2):
        series = runs.setdefault(str(seed), {})
        for step, values in rows(seed):
            for name, value in values.items():
                exact = narrow.unpack(narrow.pack(value))[0] if float32 else value
                series.setdefault(name, []).append((step, float(exact).hex()))
    return runs


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    for write in (write_mlflow, write_tensorboard, write_trackio, write_wandb):
        if len(sys.argv) < 3 or write.__name__.removeprefix("write_") in sys.argv[2:]:
            began = time.perf_counter()
            write(target)
            print(f"{write.__name__} {time.perf_counter() - began:.1f} s")
    for kind, float32 in (("float64", False), ("float32", True)):
        path = target / f"expected.{kind}.json"
        path.write_text(json.dumps(expected(float32=float32)), encoding="utf-8")
