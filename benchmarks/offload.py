"""Training beyond memory: bytes moved and step time of Windlass in phases and of its rivals.

    python benchmarks/offload.py [--phases 6] [--accumulations 1 8] [--only windlass fsdp2 ...]
        [--rivals-python PATH]

All train `gpt2-124m` eagerly, one sequence of 512 tokens a micro-batch, with bfloat16 weights,
float32 masters, AdamW and clipping by the global norm, each in processes of its own, in turn. One
step warms up, three are measured.

- `in_memory`: Windlass with all in memory, for comparison;
- `windlass`: Windlass in phases, with weights, gradients and optimizer state offloaded to disk;
- `fsdp2`: PyTorch's `fully_shard` for each block with CPUOffloadPolicy, which all-gathers the
  weights for each micro-batch; nothing is recomputed. On a CPU its weights move from memory to
  memory. In `fsdp2_pair` two ranks of one thread share the micro-batches, and their figures are
  summed;
- `zero_infinity`: DeepSpeed ZeRO-3, weights offloaded to disk, all else in memory; it needs libaio
  and a C++ compiler, and on its first run it builds its own libraries for minutes;
- `accelerate_cpu`, `accelerate_disk`: whether a model under these hooks can train at all;
- `zero_infinity_formula`: the formula of its paper for the same case, with all state on disk.

Weights are counted when they reach the copy that computes, in that copy's precision (FSDP2
transfers them as float32, so twice as much over a real link), gradients when they are offloaded.
Peaks are the kernel's for the whole process after the warm-up step (`VmHWM`), disk bytes the
kernel's for each step (`/proc/self/io`). `known` states where the moved bytes come from: `program`
means the bytes that Windlass's program states, to be compared with the disk bytes beside them,
which include the optimizer state; `counted` means counted at each transfer; `kernel` means disk
bytes that are nothing else; `formula` means from a paper.
"""

import argparse
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  the field's name for it
from torch.utils._python_dispatch import TorchDispatchMode

from in_memory import plain_model, tokens
from results import append_row

MODEL, SEQUENCE = "gpt2-124m", 512
WARM, MEASURED = 1, 3
PARAMETERS = 124_439_808
Figures = dict[str, Any]
"""Figures of one contestant, or under `note` the reason why there are none."""


def measure(step: Callable[[], object], moved: Callable[[], tuple[int, int]]) -> Figures:
    """Takes all steps and returns the medians of the measured ones.

    Args:
        step: takes one step.
        moved: returns bytes of weights that arrived and of gradients that left since the start.
    """
    rows = []
    for number in range(WARM + MEASURED):
        if number == WARM:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, start = (*disk_bytes(), *moved()), time.perf_counter()
        step()
        after = (*disk_bytes(), *moved())
        rows.append((time.perf_counter() - start, *(b - a for a, b in zip(before, after))))  # noqa: B905
    seconds, read, written, weights, gradients = (
        statistics.median(column) for column in zip(*rows[WARM:], strict=True)
    )
    return {
        "seconds": seconds, "peak_bytes": peak_bytes(), "weight_bytes": weights,
        "gradient_bytes": gradients, "read_bytes": read, "written_bytes": written,
    }  # fmt: skip


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counters = dict(line.split(": ") for line in lines)
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def peak_bytes() -> int:
    """Peak resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def plain_step(run: nn.Module, accumulation: int, optimizer: torch.optim.Optimizer) -> None:
    """One step of a hand-written loop."""
    inputs, targets = tokens(1)
    for _ in range(accumulation):
        loss = F.cross_entropy(run(inputs).float().flatten(0, 1), targets.flatten())
        (loss / accumulation).backward()
    nn.utils.clip_grad_norm_(run.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def windlass(accumulation: int, phases: int, folder: Path) -> Figures:
    """A run of Windlass; weights and gradients are counted in its program."""
    import windlass
    from windlass.program.lowering.lower import lower
    from windlass.program.memory.tier_traffic import TierTraffic, sum_tiers
    from windlass.program.phases import deferred_update_layers

    steps = WARM + MEASURED + 1  # the last one also evaluates and saves, and does not run
    planned = windlass.plan(
        MODEL, f"phases={phases}", "batch.micro=1", f"train.batch={accumulation}",
        f"train.sequence={SEQUENCE}", f"train.steps={steps}", "precision=bfloat16", "compile=false",
        "recompute=none", f"train.evaluate_every={steps + 1}", f"train.save_every={steps + 1}",
    )  # fmt: skip
    plan, graph = planned.plan, planned.graph
    deferred = deferred_update_layers(plan, graph)
    traffic = TierTraffic(plan, graph)
    weights = gradients = 0
    for instruction in lower(plan, graph)[0].instructions:
        # A deferred update brings its layer into device memory, as a prefetch does.
        if instruction.kind == "prefetch_weights" or (
            instruction.kind == "update" and instruction.layer in deferred
        ):
            weights += sum_tiers(traffic.instruction_traffic(instruction, stored=False)).read
        elif instruction.kind == "offload_grads":
            gradients += sum_tiers(traffic.instruction_traffic(instruction)).written
    run = iter(windlass.train(planned, folder=folder / "run"))
    figures = measure(lambda: next(run), lambda: (0, 0))
    return {
        **figures, "weight_bytes": weights, "gradient_bytes": gradients, "known": "program",
    }  # fmt: skip


class ReducedBytes(TorchDispatchMode):
    """Counts the bytes of gradients that FSDP2 prepares for reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Runs an operation and counts its output if it prepares a reduction."""
        if str(function) == "fsdp.chunk_cat.default":
            self.bytes += kwargs["out"].nbytes
        return function(*args, **(kwargs or {}))


def fsdp2(accumulation: int, ranks: int, rank: int, folder: Path) -> Figures:
    """PyTorch's FSDP2; each rank takes its share of the micro-batches."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    if accumulation % ranks:
        return {"note": f"{accumulation} micro-batch cannot be shared by {ranks} ranks"}
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    model = plain_model()
    tied = {id(weight) for layer in (model[0], model[-1]) for weight in layer.parameters()}
    for layer in model:
        if not any(id(weight) in tied for weight in layer.parameters()):
            fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard(model, **options)  # the embedding and the head, whose weights are tied
    gathered = 0
    original = FSDPParam.init_unsharded_param

    def init_and_count(weight: FSDPParam) -> None:
        nonlocal gathered
        gathered += sum(part.nbytes for part in weight.all_gather_outputs)
        original(weight)

    FSDPParam.init_unsharded_param = init_and_count  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with ReducedBytes() as reduced:
        figures = measure(
            lambda: plain_step(model, accumulation // ranks, optimizer),
            lambda: (gathered, reduced.bytes),
        )
    dist.destroy_process_group()
    return {**figures, "known": "counted"}


def zero_infinity(accumulation: int, folder: Path) -> Figures:
    """DeepSpeed ZeRO-3 with weights on disk, configured to cache none of them.

    With the defaults of `max_in_cpu` and `stage3_max_live_parameters`, 1e9 parameters each, a model
    as small as this one would stay in memory.
    """
    for name, value in {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }.items():  # fmt: skip
        os.environ[name] = value
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0,
            "offload_param": {
                "device": "nvme", "nvme_path": str(folder), "pin_memory": False,
                "buffer_count": 20, "buffer_size": 45_000_000, "max_in_cpu": 0,
            },
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    }  # fmt: skip
    model = plain_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    inputs, targets = tokens(1)

    def step() -> None:
        for _ in range(accumulation):
            logits = engine(inputs).float()
            engine.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
            engine.step()

    figures = measure(step, lambda: (disk_bytes()[0], 0))
    return {**figures, "gradient_bytes": math.nan, "known": "kernel"}


def zero_infinity_formula(accumulation: int) -> Figures:
    """Weights arrive for each forward and each backward pass, gradients leave for each micro-batch.

    These are 2 x 2 and 2 bytes a parameter for each micro-batch. Float32 masters, moments and
    gradients, 16 bytes a parameter, are read and written once a step. Source: Rajbhandari et
    al. 2021, ZeRO-Infinity, arXiv:2104.07857.
    """
    weights, gradients = 2 * 2 * PARAMETERS * accumulation, 2 * PARAMETERS * accumulation
    state = 16 * PARAMETERS
    return {
        "seconds": math.nan, "peak_bytes": math.nan, "weight_bytes": weights,
        "gradient_bytes": gradients, "read_bytes": weights + state,
        "written_bytes": gradients + state, "known": "formula",
    }  # fmt: skip


def accelerate(kind: str, folder: Path) -> Figures:
    """Whether a model under Accelerate's hooks gets gradients; they are made for inference."""
    from accelerate import cpu_offload, disk_offload

    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    layer_names = [type(layer).__name__ for layer in model]
    device = torch.device("cpu")
    if kind == "cpu":
        cpu_offload(model, device, preload_module_classes=layer_names)
    else:
        disk_offload(model, str(folder / "weights"), device, preload_module_classes=layer_names)
    inputs, targets = tokens(1)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    count = sum(weight.grad is not None for weight in weights)
    return {"note": f"backward runs, and {count} of {len(weights)} parameters have a gradient"}


CONTESTANTS: dict[str, tuple[str, int, Callable[[int, int, int, Path], Figures]]] = {
    "in_memory": ("windlass", 1, lambda a, _p, _r, folder: windlass(a, 1, folder)),
    "windlass": ("windlass", 1, lambda a, phases, _r, folder: windlass(a, phases, folder)),
    "fsdp2": ("torch", 1, lambda a, _p, rank, folder: fsdp2(a, 1, rank, folder)),
    "fsdp2_pair": ("torch", 2, lambda a, _p, rank, folder: fsdp2(a, 2, rank, folder)),
    "zero_infinity": ("deepspeed", 1, lambda a, _p, _r, folder: zero_infinity(a, folder)),
    "accelerate_cpu": ("accelerate", 1, lambda _a, _p, _r, folder: accelerate("cpu", folder)),
    "accelerate_disk": ("accelerate", 1, lambda _a, _p, _r, folder: accelerate("disk", folder)),
    "zero_infinity_formula": ("torch", 1, lambda a, _p, _r, _f: zero_infinity_formula(a)),
}
"""Name -> package, number of processes, and what each process runs."""


def contest(name: str, accumulation: int, phases: int, python: str) -> Figures:
    """One contestant in processes of its own: seconds of the slowest, sums of all bytes."""
    package, ranks, _ = CONTESTANTS[name]
    # Rivals build our model, so they must find its package.
    sources = str(Path(__file__).parents[1] / "src")
    paths = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))
    interpreter = sys.executable if package == "windlass" else python
    command = [interpreter, __file__, "--child", name, str(accumulation), str(phases)]
    with tempfile.TemporaryDirectory(dir=Path.cwd(), suffix=".tmp") as folder, ExitStack() as ends:
        children = []
        for rank in range(ranks):
            # Files, because a rank that waits at a full pipe would block the other one.
            output, errors = Path(folder, f"output-{rank}"), Path(folder, f"errors-{rank}")
            child = subprocess.Popen(
                [*command, str(rank), folder],
                stdout=ends.enter_context(output.open("w")),
                stderr=ends.enter_context(errors.open("w")),
                env={**os.environ, "PYTHONPATH": paths},
            )
            ends.callback(child.kill)  # does nothing after the wait below
            children.append((child, output, errors))
        for child, _, errors in children:
            if child.wait():
                lines = errors.read_text().strip().splitlines()
                return {"note": lines[-1] if lines else f"ended with {child.returncode}"}
        outputs = [output.read_text() for _, output, _ in children]
    parts = [json.loads(output.splitlines()[-1]) for output in outputs]
    if "note" in parts[0]:
        return parts[0]
    summed = {key: sum(part[key] for part in parts) for key in parts[0] if key.endswith("_bytes")}
    return {**parts[0], **summed, "seconds": max(part["seconds"] for part in parts)}


def show(name: str, accumulation: int, figures: Figures) -> None:
    """Prints one line of the table."""
    if "note" in figures:
        print(f"{name:22} {accumulation:4}  {figures['note']}")
        return
    peak_mib = figures["peak_bytes"] / 2**20
    gigabytes = (figures[f"{key}_bytes"] / 1e9 for key in ("weight", "gradient", "read", "written"))
    print(
        f"{name:22} {accumulation:4}  {figures['seconds']:6.2f} {peak_mib:9.0f}  "
        + " ".join(f"{value:9.2f}" for value in gigabytes)
        + f"  {figures['known']}",
        flush=True,
    )


def main() -> None:
    """Reads the command line, runs all in turn, prints the table and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--phases", type=int, default=6)
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rivals-python", default=sys.executable)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, accumulation, phases, rank, folder = options.child
        package, _, run = CONTESTANTS[name]
        figures: Figures = {"note": f"{package} is not installed"}
        if importlib.util.find_spec(package) is not None:
            figures = run(int(accumulation), int(phases), int(rank), Path(folder))
        sys.stdout.write("\n" + json.dumps(figures) + "\n")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children end too
    print(
        f"{'':22} {'acc.':>4}  {'s/step':>6} {'peak MiB':>9}  {'weights':>9} {'gradients':>9} "
        f"{'read':>9} {'written':>9}  known        (GB a step; read and written: disk)"
    )
    for accumulation in options.accumulations:
        for name in options.only:
            figures = contest(name, accumulation, options.phases, options.rivals_python)
            show(name, accumulation, figures)
            if "note" not in figures:
                phases = options.phases if name == "windlass" else 1
                append_row(
                    "offload", contestant=name, phases=phases, accumulation=accumulation, **figures
                )


if __name__ == "__main__":
    main()
