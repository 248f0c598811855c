"""Two ranks that train on the simulated device; called with a folder.

`jobs.json` has a list of [plan, schedule, site to leave out or null]. Each rank writes what every
job left: its losses, hashes of all checkpoints, faults, and the sites where streams wait.
"""

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from factories import catalog_graph
from forked_runs import share_imports
from simulated_device import AT_ONCE, SCHEDULES, SimulatedDevice
from windlass.data.batches import Batches
from windlass.data.dataset_cache import prepare_dataset
from windlass.models.build import build_layer_stack
from windlass.program.lowering.lower import lower
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.data_request import DataRequest
from windlass.schema.plan import Plan
from windlass.schema.train_request import TrainSettings

RANKS = 2
SHAPE = {"layers": 2, "width": 16, "heads": 2, "sequence": 8, "dropout": 0.1, "vocabulary": 257}
SETTINGS = TrainSettings(
    steps=2, batch=4, sequence=8, learning_rate=1e-2, warmup=0.4, epsilon=1e-4, seed=7, clip=0.5,
    save_every=2, evaluate_every=2, evaluate_sequences=4,
)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder = Path(sys.argv[1])
    share_imports()
    for rank in range(RANKS):
        if os.fork() == 0:
            try:
                run_rank(rank, folder)
            except BaseException:  # noqa: BLE001  a forked process must not return
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    for _ in range(RANKS):
        if os.wait()[1] != 0:
            os.killpg(0, signal.SIGKILL)  # the other would wait for it


def run_rank(rank: int, folder: Path) -> None:
    """Writes what all jobs left on a rank."""
    data = DataRequest(source=str(folder / "text"), tokenizer="byte", held_out=0.2)
    tokens = prepare_dataset(data, cache=folder / f"cache{rank}")
    train = partial(run_job, Batches(tokens, sequence=8, batch=4, seed=3), rank)
    results = []
    for number, (plan, schedule, dropped) in enumerate(
        json.loads((folder / "jobs.json").read_text())
    ):
        drop = frozenset([tuple(dropped)]) if dropped else frozenset()
        results.append(train(Plan.model_validate(plan), schedule, drop, folder / f"job{number}"))
    (folder / f"results{rank}.json").write_text(json.dumps(results))


def run_job(
    batches: Batches, rank: int, plan: Plan, schedule: str, drop: frozenset[Any], folder: Path
) -> dict[str, Any]:
    """What a run under one schedule left."""
    folder.mkdir(exist_ok=True)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    graph = catalog_graph("gpt-tiny", **SHAPE)
    by_name = {each.name: each for each in (AT_ONCE, *SCHEDULES)}
    with (
        SimulatedDevice(by_name[schedule], seed=rank, drop=drop) as device,
        patch.object(dist, "new_group", _after_all_work(device, dist.new_group)),
    ):
        context = RankContext(
            plan=plan, stack=build_layer_stack("gpt-tiny", SHAPE, device="meta", seed=7),
            program=lower(plan, graph)[rank], settings=SETTINGS, checkpoints=folder / "checkpoints",
            graph=graph, device=device,
        )  # fmt: skip
        losses = [step.loss for step in train_loop(context, batches)]
        device.synchronize()
        dist.barrier()
    dist.destroy_process_group()
    files = sorted((folder / "checkpoints").glob("*/*.safetensors"))
    return {
        "losses": losses,
        "files": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        "faults": device.simulation.faults,
        "sites": sorted(device.simulation.sites),
        "operations": device.simulation.operations,
    }


def _after_all_work(device: SimulatedDevice, call: Callable[..., object]) -> Callable[..., object]:
    """What makes a group, once the device has done its work.

    A device goes on while the hosts of all ranks meet. The simulated one would not, and a rank that
    waits for its message would never come.
    """

    def finish_and_call(*args: object, **kwargs: object) -> object:
        device.synchronize()
        return call(*args, **kwargs)

    return finish_and_call


if __name__ == "__main__":
    main()
