"""Runs of one plan in a folder of runs, written as a training loop writes them."""

from pathlib import Path

import numpy as np

from factories import catalog_graph, tiny_machine, tiny_plan
from windlass.schema import GRAPH_FILE, MACHINE_FILE, PLAN_FILE, Step
from windlass.tracking import RunFolder, create_run_folder

STEPS = 60


def make_run(root: Path, seed: int, *, factor: float = 1.0, loss_factor: float = 1.0) -> RunFolder:
    """A run of 60 steps whose folder is still locked; `factor` is on the time from step 21 on."""
    graph, machine = catalog_graph("gpt-tiny"), tiny_machine()
    documents = {
        GRAPH_FILE: graph, MACHINE_FILE: machine, PLAN_FILE: tiny_plan(graph, machine)
    }  # fmt: skip
    meta = {"model": "gpt-tiny", "machine": "tiny", "steps": STEPS}
    run = create_run_folder(root, "gpt-tiny", documents=documents, meta=meta)
    for step in made_steps(seed, factor, loss_factor):
        run.append_step(step)
    return run


def made_steps(seed: int, factor: float, loss_factor: float) -> list[Step]:
    rng = np.random.default_rng(seed)
    level = 0.1 * np.exp(rng.normal(0, 0.01))
    steps = []
    for number in range(1, STEPS + 1):
        slow = factor if number > 20 else 1.0
        forward = 0.4 * level * slow * np.exp(rng.normal(0, 0.02))
        backward = 0.6 * level * np.exp(rng.normal(0, 0.02))
        steps.append(
            Step(
                step=number, loss=loss_factor * (4 - number / STEPS) * np.exp(rng.normal(0, 0.01)),
                gradient_norm=np.exp(rng.normal(0, 0.1)), learning_rate=1e-3, tokens=512,
                seconds=forward + backward, memory_bytes=2**30,
                by_kind={"forward": forward, "backward": backward},
            )
        )  # fmt: skip
    return steps
