"""Other trackers themselves write what is imported, and read what is mirrored.

They need a Python that has `mlflow`, `tensorboard`, `trackio`, `wandb`, `transformers` and
`lightning` beside Windlass's own dependencies, named by `WINDLASS_PEERS`.
"""

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import windlass
from windlass.integrations import import_runs, init
from windlass.schema import CONFIG_FILE, RunConfig
from windlass.tracking import Journal, journal_path, load_run, read_journal, read_series

PEERS = os.environ.get("WINDLASS_PEERS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PEERS is None,
        reason="needs WINDLASS_PEERS, a Python with the other trackers and trainers",
    ),
]


def python(code: str, folder: Path, *words: str) -> str:
    """Runs code in the peers' Python, in a folder of its own."""
    source = Path(windlass.__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": str(source),
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_ERROR_REPORTING": "false",
        "HF_HUB_OFFLINE": "1",
    }
    command = (str(PEERS), "-c", code, *words)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def journal_of(folder: Path) -> Journal:
    return read_journal(journal_path(folder, 0, 1))


def points(folder: Path) -> Counter[tuple[int, str, str]]:
    return Counter(
        (row.step, name, value.hex())
        for row in journal_of(folder).rows
        for name, value in row.values.items()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with init(
        config={"optimizer": {"lr": 0.1 + 0.2}}, name="mine", tags=["a=b"], notes="n", root=tmp_path
    ) as run:
        for step in range(1, 21):
            run.log({"loss": 1 / step, "train/lr": 1e-300 * step}, step=step)
    return run.folder


def test_runs_that_the_trackers_write_now_are_equal_to_the_bit(tmp_path: Path):
    maker = Path(__file__).with_name("make_peer_runs.py").read_text(encoding="utf-8")
    made = tmp_path / "made"
    python(maker, tmp_path, str(made))
    for source, tracker in (
        ("mlflow.db", "mlflow"),
        ("trackio", "trackio"),
        ("wandb", "wandb"),
        ("tensorboard", "tensorboard"),
    ):
        runs = import_runs(made / source, tmp_path / "runs").runs
        kind = "float32" if tracker == "tensorboard" else "float64"
        # MLflow stores the largest number in place of an infinite one.
        stored = {"inf": sys.float_info.max.hex()} if tracker == "mlflow" else {}
        expected = json.loads((made / f"expected.{kind}.json").read_text(encoding="utf-8"))
        assert len(runs) == 2
        for item in runs:
            given = Counter(
                (step, name, stored.get(value, value))
                for name, series in expected[item.run.name[-1]].items()
                for step, value in series
            )
            assert points(item.folder) == given, tracker


MIRROR = """
import sys
from pathlib import Path
from windlass.integrations import mirror_run
for _ in range(2):
    mirror_run(Path(sys.argv[1]), tuple(sys.argv[2:]))
"""


def test_copies_in_mlflow_wandb_and_trackio_come_back_as_they_went(folder: Path, tmp_path: Path):
    targets = ("mlflow:sqlite:///mlflow.db", "wandb:offline", "trackio:mirrored")
    python(MIRROR, tmp_path, str(folder), *targets)
    for source in ("mlflow.db", "offline", "trackio"):
        (item,) = import_runs(tmp_path / source, tmp_path / "back").runs
        assert points(item.folder) == points(folder), source
        assert item.run.state == "finished"
        assert item.run.name == "mine"
        assert str(item.run.config["optimizer.lr"]) == "0.30000000000000004"


def test_mlflow_itself_finds_the_run_by_its_id(folder: Path, tmp_path: Path):
    python(MIRROR, tmp_path, str(folder), "mlflow:sqlite:///mlflow.db")
    code = """
import json, mlflow
client = mlflow.MlflowClient("sqlite:///mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("windlass").experiment_id])
history = client.get_metric_history(run.info.run_id, "loss")
files = [item.path for item in client.list_artifacts(run.info.run_id)]
print(json.dumps([run.data.tags, run.info.status, [m.value for m in history], files]))
"""
    tags, status, values, files = json.loads(python(code, tmp_path).splitlines()[-1])
    assert tags["windlass.uid"] == load_run(folder).id
    assert tags["a"] == "b"
    assert status == "FINISHED"
    assert values == [1 / step for step in range(1, 21)]
    assert "config.json" in files


def test_a_copy_in_mlflow_grows_with_its_run(tmp_path: Path):
    run = init(folder=tmp_path / "run")
    for steps in (range(1, 6), range(6, 11)):
        for step in steps:
            run.log({"loss": 1 / step}, step=step)
        python(MIRROR, tmp_path, str(run.folder), "mlflow:sqlite:///mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:  # as if the last copy was cut off
        database.execute("DELETE FROM tags WHERE key = 'windlass.rows'")
        database.execute("DELETE FROM metrics WHERE step = 8")
    run.finish()
    python(MIRROR, tmp_path, str(run.folder), "mlflow:sqlite:///mlflow.db")
    (item,) = import_runs(tmp_path / "mlflow.db", tmp_path / "back").runs
    assert points(item.folder) == points(run.folder)
    assert item.run.state == "finished"


def test_a_training_of_transformers_is_recorded(tmp_path: Path):
    code = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from windlass.integrations.transformers import WindlassCallback

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8))
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
args = TrainingArguments(
    "out", max_steps=6, logging_steps=2, report_to=[], use_cpu=True, save_strategy="no",
    disable_tqdm=True, per_device_train_batch_size=2,
)
callback = WindlassCallback(name="tiny", root="runs", config={"note": "mine"})
trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:4], callbacks=[callback])
trainer.train()
trainer.evaluate()
callback.run.finish()
"""
    python(code, tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    record = load_run(folder)
    assert (record.state, record.faults) == ("finished", ())
    series = read_series(folder)
    assert series["loss"].steps.tolist() == [2, 4, 6]
    assert series["eval_loss"].steps.tolist() == [6]
    values = RunConfig.load(folder / CONFIG_FILE).values
    assert values["trainer.max_steps"] == 6
    assert values["model_config.n_embd"] == 8
    assert (values["model"], values["note"]) == ("GPT2LMHeadModel", "mine")


def test_a_training_of_lightning_is_recorded(tmp_path: Path):
    code = """
import torch
from lightning.pytorch import LightningModule, Trainer
from windlass.integrations.lightning import WindlassLogger

class Line(LightningModule):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss
    def test_step(self, batch, index):
        self.log("test_loss", self.layer(batch).pow(2).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.ones(12, 3), batch_size=2)
logger = WindlassLogger(name="line", root="runs")
trainer = Trainer(
    logger=logger, max_epochs=1, log_every_n_steps=1, accelerator="cpu", enable_progress_bar=False,
    enable_checkpointing=False, enable_model_summary=False,
)
module = Line()
trainer.fit(module, data)
trainer.test(module, data, verbose=False)
"""
    python(code, tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    record = load_run(folder)
    assert (record.state, record.faults) == ("finished", ())
    series = read_series(folder)
    assert series["loss"].steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert "test_loss" in series
    assert RunConfig.load(folder / CONFIG_FILE).values["width"] == 3
