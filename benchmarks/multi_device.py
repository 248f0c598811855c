"""Step time on several devices: Windlass against torch's DDP, FSDP2 and pipelining, over gloo.

    python benchmarks/multi_device.py [--rounds 3] [--devices 2 4] [--stack torch]

All train the same float32 model eagerly on tokens of the same shape, clip by the global norm and
update with fused AdamW. Contestants take turns round by round, each in processes of its own with
one thread. The table shows medians of step times and the ratio ours / theirs: below 1 Windlass is
faster. The cases:

- `replicas`: data parallelism, against DDP;
- `shards`: parameters, gradients and optimizer state sharded over all devices, against FSDP2 with
  resharding;
- `stages`: a 1F1B pipeline, against the 1F1B of torch.distributed.pipelining. There the first and
  the last stage keep and update separate copies of the tied embedding, so it communicates less.

With `--stack torch` Windlass runs the same parts of torch, and rows go to `torch_engine.csv`.
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
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from results import append_row

STEPS, WARM = 8, 3
RIVALS = {"replicas": "ddp", "shards": "fsdp2", "stages": "pipelining"}


@dataclass(frozen=True, slots=True)
class Case:
    """What both sides train, and how it is parallelized."""

    name: str
    """One of `RIVALS`."""
    model: str
    devices: int
    batch: int
    micro: int
    sequence: int


def windlass_seconds(case: Case, engine: str | None) -> float:
    """Median seconds of a step under `windlass train`, on its own runtime or on an engine."""
    import windlass

    parallelism = {
        "replicas": [
            f"parallel.data={case.devices}", "sharding.parameters=1", "sharding.optimizer=1",
        ],
        "shards": [
            f"parallel.data={case.devices}", f"sharding.parameters={case.devices}",
            f"sharding.optimizer={case.devices}", *(["sharding.reshard=true"] if engine else []),
        ],
        "stages": [f"parallel.pipeline={case.devices}"],
    }[case.name]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        planned = windlass.plan(
            case.model, *parallelism, f"train.batch={case.batch}", f"batch.micro={case.micro}",
            f"train.sequence={case.sequence}", f"train.steps={STEPS}", "precision=float32",
            "compile=false", "recompute=none", "train.evaluate_sequences=0",
            f"train.save_every={STEPS}", "model.dropout=0", stack=engine,
        )  # fmt: skip
        steps = [step.seconds for step in windlass.train(planned, folder=Path(folder) / "run")]
    return statistics.median(steps[WARM:])


def torch_seconds(case: Case) -> float:
    """Median seconds of a step of the rival in torch, from processes that are started here."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", *map(str, astuple(case))],
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
               "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(case.devices)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(case.devices)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{case.name} on {case.devices} processes failed")
    return float(json.loads(outputs[-1].splitlines()[-1]))


def run_torch_rank(case: Case) -> None:
    """Runs one process of the rival; the last rank prints the median seconds of a step."""
    import torch
    import torch.distributed as dist

    from windlass.models.build import build_layer_stack

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    stack = build_layer_stack(case.model, {"dropout": 0.0}, device="cpu", seed=0)
    model = torch.nn.Sequential(*stack.layers)
    make_step = {"replicas": _ddp_step, "shards": _fsdp_step, "stages": _pipeline_step}[case.name]
    step = make_step(case, model, stack.vocabulary)
    seconds: list[float] = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == case.devices - 1:
        print(json.dumps(statistics.median(seconds[WARM:])))
    dist.destroy_process_group()


def _tokens(count: int, sequence: int, vocabulary: int) -> tuple[Any, Any]:
    import torch

    inputs = torch.randint(vocabulary, (count, sequence))
    return inputs, torch.randint(vocabulary, (count, sequence))


def _loss(logits: Any, targets: Any) -> Any:  # noqa: ANN401  tensors; torch is imported late
    from windlass.models.loss import mean_cross_entropy

    return mean_cross_entropy(logits, targets)


def _replica_batches(case: Case, vocabulary: int) -> list[tuple[Any, Any]]:
    count = case.batch // case.devices // case.micro
    return [_tokens(case.micro, case.sequence, vocabulary) for _ in range(count)]


def _ddp_step(case: Case, layers: Any, vocabulary: int) -> Callable[[], None]:  # noqa: ANN401
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = _replica_batches(case, vocabulary)

    def step() -> None:
        for index, (inputs, targets) in enumerate(batches):
            model.require_backward_grad_sync = index == len(batches) - 1
            (_loss(model(inputs), targets) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fsdp_step(case: Case, layers: Any, vocabulary: int) -> Callable[[], None]:  # noqa: ANN401
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (case.devices,))
    fully_shard([layers[0], layers[-1]], mesh=mesh)  # their weights are tied
    for layer in layers[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    batches = _replica_batches(case, vocabulary)

    def step() -> None:
        for index, (inputs, targets) in enumerate(batches):
            layers.set_requires_gradient_sync(index == len(batches) - 1)
            (_loss(layers(inputs), targets) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _pipeline_step(case: Case, layers: Any, vocabulary: int) -> Callable[[], None]:  # noqa: ANN401
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from windlass.capture.capture_layers import capture_graph
    from windlass.models.layer_stack import layer_stack_from_module
    from windlass.planner.space.stage_partition import stage_partition

    rank = dist.get_rank()
    stack = layer_stack_from_module(
        layers, "bench", vocabulary=vocabulary, max_sequence=case.sequence
    )
    first, last = stage_partition(capture_graph(stack), case.devices, case.sequence)[rank]
    part = torch.nn.Sequential(*list(layers)[first:last])
    stage = PipelineStage(part, rank, case.devices, torch.device("cpu"))
    micros = case.batch // case.micro
    schedule = Schedule1F1B(
        stage, micros, scale_grads=False,
        loss_fn=lambda logits, targets: _loss(logits, targets) / micros,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(part.parameters(), fused=True)
    inputs, targets = _tokens(case.batch, case.sequence, vocabulary)

    def step() -> None:
        if rank == 0:
            schedule.step(inputs)
        elif rank == case.devices - 1:
            schedule.step(target=targets, losses=[])
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
    parser.add_argument("--cases", nargs="+", choices=tuple(RIVALS), default=tuple(RIVALS))
    parser.add_argument("--stack", choices=("torch",))
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        name, model, *numbers = options.rank
        run_torch_rank(Case(name, model, *map(int, numbers)))
        return
    print("case       devices  ours      theirs    ours / theirs, median (min to max)")
    for devices in options.devices:
        for name in options.cases:
            compare(
                Case(name, options.model, devices, options.batch, options.micro, options.sequence),
                options.rounds,
                options.stack,
            )


def compare(case: Case, rounds: int, engine: str | None) -> None:
    """Times both sides alternately, prints one line of the table and appends its row."""
    pairs = [(windlass_seconds(case, engine), torch_seconds(case)) for _ in range(rounds)]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(ratios)
    append_row(
        "torch_engine" if engine else "multi_device",
        model=case.model, devices=case.devices, case=case.name,
        rival=RIVALS[case.name], ours_seconds=ours, theirs_seconds=theirs, ratio=ratio,
    )  # fmt: skip
    print(
        f"{case.name:9}  {case.devices:7}  {ours:6.3f} s  {theirs:6.3f} s  {ratio:.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}) of {RIVALS[case.name]}"
    )


if __name__ == "__main__":
    main()
