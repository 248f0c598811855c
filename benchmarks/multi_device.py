"""Step time on several devices: Windlass beside torch's own parallel parts, over gloo.

    python benchmarks/multi_device.py [--devices 2 4] [--cases NAME ...] [--turns 12] [--compile]
    python benchmarks/multi_device.py --start [--rounds 5]

The same ranks hold all contestants and take a step of each in turn: the plain loop of
`plain_ranks.py`, Windlass with `--stack torch`, and Windlass's own runtime under the same plan. So
whatever else the machine does meets all alike. The table shows medians of seconds by the clock, of
processor seconds of all ranks together, and the ratios of the medians of `torch` to the plain loop,
and to the own runtime: below 1 `torch` is faster. A step is all that the training loop does between
two of them. Windlass reads its tokens and keeps a record; the plain loop has its tokens ready. All
share Windlass's allocator.

With `--start`: seconds from the command to the end of the first step, of `windlass train` and of
`torchrun` of the plain loop, in turn.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from plain_ranks import HEADS, PLAIN, RIVALS, Case, plain_step
from results import append_row

if TYPE_CHECKING:
    from windlass.jobs import Planned

WARM = 3
"""Turns that do not count."""
_LONGEST_SECONDS = 300.0
"""Time after which a rank says where it is, and ends."""
SIDES = ("plain", "torch", "own")


def words(case: Case, steps: int, stack: str) -> list[str]:
    """The request of a case for a stack; with `torch` it gathers for each pass, as FSDP2 does."""
    parallelism = {
        "replicas": ("data", 1), "shards": ("data", case.devices), "tensor": ("tensor", 1),
        "stages": ("pipeline", 1),
    }  # fmt: skip
    axis, shards = parallelism[case.name]
    sharding = [f"sharding.parameters={shards}", f"sharding.optimizer={shards}"]
    return [
        f"parallel.{axis}={case.devices}", *(sharding if axis == "data" else ()),
        f"train.batch={case.batch}", f"batch.micro={case.micro}", f"train.sequence={case.sequence}",
        f"train.steps={steps}", f"train.save_every={steps}", "train.evaluate_sequences=0",
        "precision=float32", "recompute=none", f"compile={str(case.compiled).lower()}",
        "model.dropout=0", f"model.heads={HEADS}", "machine=here",
        *(["parallel.schedule=1f1b"] if case.name == "stages" else ()),
        *(["sharding.reshard=true"] if (case.name, stack) == ("shards", "torch") else ()),
    ]  # fmt: skip


def run_rank(case: Case, turns: int, folder: Path) -> None:
    """Runs one process of all contestants; rank 0 writes the seconds of each turn."""
    faulthandler.dump_traceback_later(_LONGEST_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=int(os.environ["RANK"]),
        world_size=case.devices,
    )  # fmt: skip
    steps: dict[str, Callable[[], object]] = {
        "torch": windlass_step(case, "torch", turns, folder),
        "own": windlass_step(case, "windlass", turns, folder),
        "plain": plain_step(case),
    }
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for turn in range(turns):
        for place in range(len(SIDES)):
            side = SIDES[(place + turn) % len(SIDES)]
            dist.barrier()
            clock, processor = time.perf_counter(), time.process_time()
            steps[side]()
            used = torch.tensor([time.process_time() - processor])
            dist.barrier()
            passed = time.perf_counter() - clock
            dist.all_reduce(used)
            seconds[side].append((passed, float(used)))
    if dist.get_rank() == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def windlass_step(case: Case, stack: str, turns: int, folder: Path) -> Callable[[], object]:
    """A function that takes one step of this rank under a stack."""
    import windlass

    planned = windlass.plan(case.model, *words(case, turns + 1, stack), stack=stack)
    return steps_of_rank(planned, folder / stack)


def steps_of_rank(planned: "Planned", checkpoints: Path) -> Callable[[], object]:
    """The training loop of this rank, a step at a time."""
    from windlass.engines.torch import TorchEngine
    from windlass.jobs import prepare_data
    from windlass.program import lower
    from windlass.runtime import RankContext, RankParts, train_loop
    from windlass.training.inputs.batches import make_batches

    rank, request = dist.get_rank(), planned.request
    context = RankContext(
        plan=planned.plan, graph=planned.graph, settings=request.train, checkpoints=checkpoints,
        stack=planned.objects.stack(request.model_identity, seed=request.train.seed),
        program=lower(planned.plan, planned.graph)[rank],
    )  # fmt: skip
    batches = make_batches(planned, prepare_data(request, None))
    engine = RankParts if planned.machine.stack is None else TorchEngine
    return train_loop(context, batches, engine=engine, heartbeat=[0] * 8).__next__


def medians(turns: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Median seconds by the clock and of the processor, by contestant."""
    return {
        side: tuple(statistics.median(each) for each in zip(*pairs[WARM:], strict=True))
        for side, pairs in turns.items()
    }  # type: ignore[return-value]


def compare(case: Case, turns: int) -> None:
    """Prints one line of the table, and appends its row."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, __file__, "--rank", json.dumps(asdict(case)), folder]
        ranks = [
            subprocess.Popen([*arguments, "--turns", str(turns)], env=_environment(rank))
            for rank in range(case.devices)
        ]
        codes = [process.wait() for process in ranks]
        if any(codes):
            sys.exit(f"{case.name} on {case.devices} processes failed")
        result = medians(json.loads((Path(folder) / "seconds.json").read_text()))
    (ours, busy), (own, own_busy), (plain, plain_busy) = (
        result[side] for side in ("torch", "own", "plain")
    )
    append_row(
        "torch_engine", model=case.model, devices=case.devices, case=case.name,
        compiled=case.compiled, turns=turns - WARM, rival=RIVALS[case.name],
        torch_seconds=round(ours, 4), plain_seconds=round(plain, 4), own_seconds=round(own, 4),
        ratio=round(ours / plain, 3), processor_ratio=round(busy / plain_busy, 3),
        of_own=round(ours / own, 3), processor_of_own=round(busy / own_busy, 3),
    )  # fmt: skip
    print(
        f"{case.name:9}  {case.devices:7}  {ours:6.3f} s  {plain:6.3f} s  {own:6.3f} s  "
        f"{ours / plain:5.2f} ({busy / plain_busy:.2f}) of {RIVALS[case.name]:10}  "
        f"{ours / own:5.2f} ({busy / own_busy:.2f}) of own",
        flush=True,
    )


def _environment(rank: int) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank),
    }  # fmt: skip


def start_seconds(command: Sequence[str], sign: str) -> tuple[float, float]:
    """Seconds from a command to a line with a sign, by the clock and of the processor.

    Args:
        command: the command.
        sign: what the line of the first step holds.
    """
    begun = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    result, lines = None, []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if result is None and sign in line:
            result = time.perf_counter() - begun, processor_seconds(process.pid)
    if process.wait() or result is None:
        sys.exit(f"{' '.join(command)} showed no first step: {''.join(lines)[-800:]}")
    return result


def processor_seconds(process: int) -> float:
    """Processor seconds so far of a process and of all that it has started."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    tree = {process}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(ticks.get(each, 0) for each in tree) / os.sysconf("SC_CLK_TCK")


def compare_starts(case: Case, rounds: int) -> None:
    """Prints how long both sides take to their first step, and appends the row."""
    plain = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(case.devices), __file__, "--plain", json.dumps(asdict(case)),
    ]  # fmt: skip
    pairs = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            ours = [
                sys.executable, "-m", "windlass", "train", case.model, *words(case, 1, "torch"),
                "--stack", "torch", "--folder", str(Path(folder) / "run"),
            ]  # fmt: skip
            pair = (start_seconds(ours, "step 1/1"), start_seconds(plain, "first step"))
        if number:  # the first round fills caches
            pairs.append(pair)
    ours_s, plain_s = (
        statistics.median(side[0] for side in each) for each in zip(*pairs, strict=True)
    )
    busy, plain_busy = (
        statistics.median(side[1] for side in each) for each in zip(*pairs, strict=True)
    )
    append_row(
        "torch_start", model=case.model, devices=case.devices, case=case.name, rounds=rounds,
        torch_seconds=round(ours_s, 3), plain_seconds=round(plain_s, 3),
        ratio=round(ours_s / plain_s, 3), processor_ratio=round(busy / plain_busy, 3),
    )  # fmt: skip
    print(
        f"{case.name:9}  {case.devices:7}  {ours_s:6.2f} s  {plain_s:6.2f} s  "
        f"{ours_s / plain_s:5.2f} ({busy / plain_busy:.2f}) of torchrun",
        flush=True,
    )


def run_plain(case: Case) -> None:
    """One rank of the plain loop under torchrun: one step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain_step(case)()
    if dist.get_rank() == 0:
        print("first step", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Reads the command line, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--cases", nargs="+", choices=tuple(PLAIN), default=tuple(PLAIN))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        run_plain(Case(**json.loads(options.plain)))
        return
    if options.rank:
        case, folder = options.rank
        run_rank(Case(**json.loads(case)), options.turns, Path(folder))
        return
    print("seconds of a step by the clock, and in brackets ratios of processor seconds")
    for devices in options.devices:
        for name in options.cases:
            case = Case(
                name=name, model=options.model, devices=devices, batch=options.batch,
                micro=options.micro, sequence=options.sequence, compiled=options.compile,
            )  # fmt: skip
            if options.start:
                compare_starts(case, options.rounds)
            else:
                compare(case, options.turns + WARM)


if __name__ == "__main__":
    main()
