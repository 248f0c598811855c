"""Several devices: ours beside torch's own DDP, FSDP2 and pipeline, on gloo processes of this host.

    python benchmarks/pod.py [--model gpt-tiny] [--rounds 3] [--devices 2 4]

All train the same float32 model, eagerly, on tokens of the same shape, clip by the global norm and
update with fused AdamW. Contestants take turns round by round, each in processes of its own with
one thread, and the table shows medians of their step times and ours by theirs: below 1 ours is
faster. `replicas` is against DDP, `shards` (weights, gradients and optimizer state shared by all)
against FSDP2 with resharding, `stages` (1F1B) against torch.distributed.pipelining's 1F1B, whose
first and last stage each keep, and update apart, a table that is one in the model: it sends less.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from results import append_row

STEPS, WARM = 8, 3
PAIRS = {"replicas": "ddp", "shards": "fsdp2", "stages": "pipelining"}


def ours(case: str, model: str, devices: int, batch: int, micro: int, sequence: int) -> float:
    """Median seconds of a step under `windlass train`."""
    import windlass

    cut = {
        "replicas": [f"parallel.data={devices}", "sharding.parameters=1", "sharding.optimizer=1"],
        "shards": [
            f"parallel.data={devices}", f"sharding.parameters={devices}",
            f"sharding.optimizer={devices}",
        ],
        "stages": [f"parallel.pipeline={devices}"],
    }[case]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        planned = windlass.plan(
            model, *cut, f"train.batch={batch}", f"batch.micro={micro}",
            f"train.sequence={sequence}", f"train.steps={STEPS}", "precision=float32",
            "compile=false", "recompute=none", "train.evaluate_sequences=0",
            f"train.save_every={STEPS}", "model.dropout=0",
        )  # fmt: skip
        steps = [step.seconds for step in windlass.train(planned, folder=Path(folder) / "run")]
    return statistics.median(steps[WARM:])


def theirs(case: str, model: str, devices: int, batch: int, micro: int, sequence: int) -> float:
    """The same under torch's own parts: starts the processes and takes what the first tells."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [case, model, *map(str, (devices, batch, micro, sequence))]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), *words],
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
               "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(devices)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(devices)
    ]  # fmt: skip
    told = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{case} on {devices} processes failed")
    return float(json.loads(told[-1].splitlines()[-1]))


def rank(case: str, model: str, devices: int, batch: int, micro: int, sequence: int) -> None:
    """One of torch's processes; the last tells the median seconds of a step."""
    import torch
    import torch.distributed as dist

    from windlass.models.build import build_layer_stack

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    me = dist.get_rank()
    chain = build_layer_stack(model, {"dropout": 0.0}, device="cpu", seed=0)
    whole = torch.nn.Sequential(*chain.layers)
    setup = {"replicas": _ddp, "shards": _fsdp, "stages": _pipeline}[case]
    step = setup(whole, me, devices, batch, micro, sequence, chain.vocabulary)
    seconds: list[float] = []
    for _ in range(STEPS):
        dist.barrier()
        begin = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    if me == devices - 1:
        print(json.dumps(statistics.median(seconds[WARM:])))
    dist.destroy_process_group()


def _tokens(count: int, sequence: int, vocabulary: int) -> "tuple[object, object]":
    import torch

    x = torch.randint(vocabulary, (count, sequence))
    return x, torch.randint(vocabulary, (count, sequence))


def _loss(logits: object, y: object) -> object:
    from windlass.models.loss import mean_cross_entropy

    return mean_cross_entropy(logits, y)


def _ddp(
    whole: object, me: int, devices: int, batch: int, micro: int, sequence: int, vocabulary: int
) -> Callable[[], None]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    del me
    model = DistributedDataParallel(whole, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    micros = batch // devices // micro
    data = [_tokens(micro, sequence, vocabulary) for _ in range(micros)]

    def step() -> None:
        for at, (x, y) in enumerate(data):
            model.require_backward_grad_sync = at == micros - 1
            (_loss(model(x), y) / micros).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fsdp(
    whole: object, me: int, devices: int, batch: int, micro: int, sequence: int, vocabulary: int
) -> Callable[[], None]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    del me
    mesh = init_device_mesh("cpu", (devices,))
    fully_shard([whole[0], whole[-1]], mesh=mesh)  # they share a table
    for layer in whole[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    optimizer = torch.optim.AdamW(whole.parameters(), fused=True)
    micros = batch // devices // micro
    data = [_tokens(micro, sequence, vocabulary) for _ in range(micros)]

    def step() -> None:
        for at, (x, y) in enumerate(data):
            whole.set_requires_gradient_sync(at == micros - 1)
            (_loss(whole(x), y) / micros).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _pipeline(
    whole: object, me: int, devices: int, batch: int, micro: int, sequence: int, vocabulary: int
) -> Callable[[], None]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from windlass.capture.capture_layers import capture_graph
    from windlass.models.layer_stack import layer_stack_from_module
    from windlass.planner.space.pinned_parallelism import stages_of

    chain = layer_stack_from_module(whole, "bench", vocabulary=vocabulary, max_sequence=sequence)
    first, last = stages_of(capture_graph(chain), devices, sequence)[me]
    part = torch.nn.Sequential(*list(whole)[first:last])
    stage = PipelineStage(part, me, devices, torch.device("cpu"))
    micros = batch // micro
    schedule = Schedule1F1B(
        stage, micros, loss_fn=lambda logits, y: _loss(logits, y) / micros, scale_grads=False
    )
    optimizer = torch.optim.AdamW(part.parameters(), fused=True)
    x, y = _tokens(batch, sequence, vocabulary)

    def step() -> None:
        if me == 0:
            schedule.step(x)
        elif me == devices - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        squares = sum(p.grad.square().sum() for p in part.parameters() if p.grad is not None)
        dist.all_reduce(squares)
        factor = torch.clamp(1.0 / (squares.sqrt() + 1e-6), max=1.0)
        for p in part.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Reads the command line, runs the pairs in turn and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--cases", nargs="+", choices=tuple(PAIRS), default=tuple(PAIRS))
    parser.add_argument("--rank", nargs=7)
    asked = parser.parse_args()
    if asked.rank:
        _, case, model, *sizes = asked.rank
        rank(case, model, *map(int, sizes))
        return
    print("case       devices  ours      theirs    ours / theirs, median (least to most)")
    for devices in asked.devices:
        for case in asked.cases:
            sizes = (asked.model, devices, asked.batch, asked.micro, asked.sequence)
            pairs = [(ours(case, *sizes), theirs(case, *sizes)) for _ in range(asked.rounds)]
            ratios = sorted(one / other for one, other in pairs)
            mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratio = statistics.median(ratios)
            append_row(
                "pod", model=asked.model, devices=devices, case=case, rival=PAIRS[case],
                ours_seconds=mine, theirs_seconds=other, ratio=ratio,
            )  # fmt: skip
            print(
                f"{case:9}  {devices:7}  {mine:6.3f} s  {other:6.3f} s  {ratio:.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f}) of {PAIRS[case]}"
            )


if __name__ == "__main__":
    main()
