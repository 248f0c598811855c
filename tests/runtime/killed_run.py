"""Runs in processes of their own, to be killed; each prints a step once it is done.

Torch is imported once. A run is forked for each line of its input, prints its process id and its
steps, and after it "ended" and its exit code.
"""

from pathlib import Path

from forked_runs import fork_runs
from windlass.data.batches import Batches
from windlass.data.dataset_cache import prepare_dataset
from windlass.models.build import build_layer_stack
from windlass.program.instruction import Program
from windlass.runtime.checkpoint.checkpoint import latest_checkpoint
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.data_request import DataRequest
from windlass.schema.plan import Plan
from windlass.schema.train_request import TrainSettings


def train_job(job: dict) -> None:
    tokens = prepare_dataset(DataRequest(**job["data"]), cache=Path(job["cache"]))
    settings = TrainSettings(**job["settings"])
    plan = Plan.model_validate(job["plan"])
    folder = Path(job["folder"])
    context = RankContext(
        plan=plan,
        stack=build_layer_stack(
            "gpt-tiny",
            job["dials"],
            device="meta",
            seed=settings.seed,
            sparsity=plan.model.sparsity if plan.model else None,
            lora=plan.model.lora if plan.model else None,
        ),
        program=Program.model_validate(job["program"]),
        settings=settings,
        checkpoints=folder,
    )
    batches = Batches(
        tokens, sequence=plan.batch.sequence, batch=settings.batch, seed=settings.seed
    )
    steps = train_loop(context, batches, resume=latest_checkpoint(folder))
    for step in steps:
        print(step.step, step.loss.hex(), flush=True)


if __name__ == "__main__":
    fork_runs(train_job)
