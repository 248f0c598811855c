"""What it moves and takes to train beyond memory: Windlass in phases beside what others do.

    python benchmarks/offload.py [--phases 6] [--accumulations 1 8] [--only windlass fsdp2 ...]
        [--rivals-python PATH]

All train `gpt2-124m` eagerly, one sequence of 512 tokens a micro-batch, with bfloat16 weights,
float32 masters, AdamW and clipping by the global norm, each in processes of its own, in turn. One
step warms up, three are measured.

- `in_memory`: Windlass with all in memory, for comparison;
- `windlass`: Windlass in phases, weights, gradients and optimizer state at home on disk;
- `fsdp2`: PyTorch's `fully_shard` for each block with CPUOffloadPolicy, which gathers each
  micro-batch anew; nothing is recomputed. On a CPU its weights move from memory to memory. In
  `fsdp2_pair` two ranks of one thread share the micro-batches, and their figures are summed;
- `zero_infinity`: DeepSpeed ZeRO-3, weights at home on disk, all else in memory; it needs libaio
  and a C++ compiler, and builds its own libraries for minutes when it runs first;
- `accelerate_cpu`, `accelerate_disk`: whether these let a model train at all;
- `zero_infinity_formula`: what its paper says, for the same case, with all its state on disk.

Weights count when they come to the copy that computes, in that copy's precision (FSDP2 carries them
as float32 up to there, so over a real link twice as much), gradients when they leave for home.
Peaks are the kernel's for the whole process after the warm step (`VmHWM`), disk bytes the kernel's
for each step (`/proc/self/io`). `known` says where the moved bytes come from: `program` are those
that Windlass's program states, to be held against the disk bytes beside them, which include the
optimizer state; `counted` at each move while it ran; `kernel` disk bytes that are nothing else;
`formula` from a paper.
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
Told = dict[str, Any]
"""Figures of one contestant, or one word under `note` why there are none."""


def measured(step: Callable[[], object], moved: Callable[[], tuple[int, int]]) -> Told:
    """Takes the steps, and the median of what each took.

    Args:
        step: takes one.
        moved: bytes of weights that came and of gradients that left since the start.
    """
    rows = []
    for number in range(WARM + MEASURED):
        if number == WARM:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak until here
        before, begun = (*disk_bytes(), *moved()), time.perf_counter()
        step()
        after = (*disk_bytes(), *moved())
        rows.append((time.perf_counter() - begun, *(b - a for a, b in zip(before, after))))  # noqa: B905
    seconds, read, written, weights, gradients = (
        statistics.median(column) for column in zip(*rows[WARM:], strict=True)
    )
    return {
        "seconds": seconds, "peak_bytes": peak_bytes(), "weight_bytes": weights,
        "gradient_bytes": gradients, "read_bytes": read, "written_bytes": written,
    }  # fmt: skip


def disk_bytes() -> tuple[int, int]:
    """What this process has read from and written to disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counted = dict(line.split(": ") for line in lines)
    return int(counted["read_bytes"]), int(counted["write_bytes"])


def peak_bytes() -> int:
    """The most memory that this process held."""
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


def windlass(accumulation: int, phases: int, folder: Path) -> Told:
    """Our own run, weights and gradients counted in its program."""
    import windlass
    from windlass.program.lowering.lower import lower
    from windlass.program.memory.tier_traffic import instruction_transfer
    from windlass.program.phases import deferred_update_layers

    steps = WARM + MEASURED + 1  # the last one evaluates and saves too, and is not taken
    planned = windlass.plan(
        MODEL, f"phases={phases}", "batch.micro=1", f"train.batch={accumulation}",
        f"train.sequence={SEQUENCE}", f"train.steps={steps}", "precision=bfloat16", "compile=false",
        "recompute=none", f"train.evaluate_every={steps + 1}", f"train.save_every={steps + 1}",
    )  # fmt: skip
    plan, graph = planned.plan, planned.graph
    late = deferred_update_layers(plan, graph)
    weights = gradients = 0
    for instruction in lower(plan, graph)[0].instructions:
        # An update that was put off brings its layer near, as a fetch does.
        if instruction.kind == "fetch" or (
            instruction.kind == "update" and instruction.layer in late
        ):
            weights += instruction_transfer(plan, graph, instruction, stored=False).read
        elif instruction.kind == "store":
            gradients += instruction_transfer(plan, graph, instruction).written
    run = iter(windlass.train(planned, folder=folder / "run"))
    told = measured(lambda: next(run), lambda: (0, 0))
    return {
        **told, "weight_bytes": weights, "gradient_bytes": gradients, "known": "program",
    }  # fmt: skip


class Reduced(TorchDispatchMode):
    """Counts the gradients that FSDP2 lays out to be reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Runs an operation, and counts it if it is that one."""
        if str(function) == "fsdp.chunk_cat.default":
            self.bytes += kwargs["out"].nbytes
        return function(*args, **(kwargs or {}))


def fsdp2(accumulation: int, ranks: int, rank: int, folder: Path) -> Told:
    """PyTorch's own, each rank with its share of the micro-batches."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    if accumulation % ranks:
        return {"note": f"{accumulation} micro-batch cannot be shared by {ranks} ranks"}
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    words: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    model = plain_model()
    shared = {id(weight) for layer in (model[0], model[-1]) for weight in layer.parameters()}
    for layer in model:
        if not any(id(weight) in shared for weight in layer.parameters()):
            fully_shard(layer, reshard_after_forward=True, **words)
    fully_shard(model, **words)  # the embedding and the head, which share a weight
    gathered = 0
    place = FSDPParam.init_unsharded_param

    def placed(weight: FSDPParam) -> None:
        nonlocal gathered
        gathered += sum(part.nbytes for part in weight.all_gather_outputs)
        place(weight)

    FSDPParam.init_unsharded_param = placed  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with Reduced() as reduced:
        told = measured(
            lambda: plain_step(model, accumulation // ranks, optimizer),
            lambda: (gathered, reduced.bytes),
        )
    dist.destroy_process_group()
    return {**told, "known": "counted"}


def zero_infinity(accumulation: int, folder: Path) -> Told:
    """DeepSpeed ZeRO-3 with weights on disk, told to keep none for later.

    A model as small as this one would stay in memory with the defaults of `max_in_cpu` and
    `stage3_max_live_parameters`, which are 1e9 parameters each.
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

    told = measured(step, lambda: (disk_bytes()[0], 0))
    return {**told, "gradient_bytes": math.nan, "known": "kernel"}


def zero_infinity_formula(accumulation: int) -> Told:
    """Weights come for the forward and for the backward pass of each micro-batch, gradients leave.

    So 2 x 2 and 2 bytes a parameter each; float32 masters, moments and gradients, 16 bytes a
    parameter, are read and written once a step. Source: Rajbhandari et al. 2021, ZeRO-Infinity,
    arXiv:2104.07857.
    """
    weights, gradients = 2 * 2 * PARAMETERS * accumulation, 2 * PARAMETERS * accumulation
    state = 16 * PARAMETERS
    return {
        "seconds": math.nan, "peak_bytes": math.nan, "weight_bytes": weights,
        "gradient_bytes": gradients, "read_bytes": weights + state,
        "written_bytes": gradients + state, "known": "formula",
    }  # fmt: skip


def accelerate(kind: str, folder: Path) -> Told:
    """Whether a model under Accelerate's hooks gets gradients; they were made for inference."""
    from accelerate import cpu_offload, disk_offload

    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole = [type(layer).__name__ for layer in model]
    device = torch.device("cpu")
    if kind == "cpu":
        cpu_offload(model, device, preload_module_classes=whole)
    else:
        disk_offload(model, str(folder / "weights"), device, preload_module_classes=whole)
    inputs, targets = tokens(1)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    has = sum(weight.grad is not None for weight in held)
    return {"note": f"backward runs, and {has} of {len(held)} parameters have a gradient"}


CONTESTANTS: dict[str, tuple[str, int, Callable[[int, int, int, Path], Told]]] = {
    "in_memory": ("windlass", 1, lambda a, _p, _r, folder: windlass(a, 1, folder)),
    "windlass": ("windlass", 1, lambda a, phases, _r, folder: windlass(a, phases, folder)),
    "fsdp2": ("torch", 1, lambda a, _p, rank, folder: fsdp2(a, 1, rank, folder)),
    "fsdp2_pair": ("torch", 2, lambda a, _p, rank, folder: fsdp2(a, 2, rank, folder)),
    "zero_infinity": ("deepspeed", 1, lambda a, _p, _r, folder: zero_infinity(a, folder)),
    "accelerate_cpu": ("accelerate", 1, lambda _a, _p, _r, folder: accelerate("cpu", folder)),
    "accelerate_disk": ("accelerate", 1, lambda _a, _p, _r, folder: accelerate("disk", folder)),
    "zero_infinity_formula": ("torch", 1, lambda a, _p, _r, _f: zero_infinity_formula(a)),
}
"""Package, processes, and what each of them runs."""


def contest(name: str, accumulation: int, phases: int, python: str) -> Told:
    """One contestant in processes of its own; seconds of the slowest, all else summed."""
    package, ranks, _ = CONTESTANTS[name]
    # Rivals build the model of our own shape, so they must find it.
    sources = str(Path(__file__).parents[1] / "src")
    paths = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))
    interpreter = sys.executable if package == "windlass" else python
    words = [interpreter, __file__, "--child", name, str(accumulation), str(phases)]
    with tempfile.TemporaryDirectory(dir=Path.cwd(), suffix=".tmp") as folder, ExitStack() as ends:
        children = []
        for rank in range(ranks):
            # Files, for a rank that waits at a full pipe would hold up the other one.
            said, errors = Path(folder, f"said-{rank}"), Path(folder, f"errors-{rank}")
            child = subprocess.Popen(
                [*words, str(rank), folder],
                stdout=ends.enter_context(said.open("w")),
                stderr=ends.enter_context(errors.open("w")),
                env={**os.environ, "PYTHONPATH": paths},
            )
            ends.callback(child.kill)  # which does nothing once it was waited for
            children.append((child, said, errors))
        for child, _, errors in children:
            if child.wait():
                told = errors.read_text().strip().splitlines()
                return {"note": told[-1] if told else f"ended with {child.returncode}"}
        outputs = [said.read_text() for _, said, _ in children]
    parts = [json.loads(output.splitlines()[-1]) for output in outputs]
    if "note" in parts[0]:
        return parts[0]
    summed = {key: sum(part[key] for part in parts) for key in parts[0] if key.endswith("_bytes")}
    return {**parts[0], **summed, "seconds": max(part["seconds"] for part in parts)}


def show(name: str, accumulation: int, told: Told) -> None:
    """One line of the table."""
    if "note" in told:
        print(f"{name:22} {accumulation:4}  {told['note']}")
        return
    gigabytes = (told[f"{key}_bytes"] / 1e9 for key in ("weight", "gradient", "read", "written"))
    print(
        f"{name:22} {accumulation:4}  {told['seconds']:6.2f} {told['peak_bytes'] / 2**20:9.0f}  "
        + " ".join(f"{value:9.2f}" for value in gigabytes)
        + f"  {told['known']}",
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
    asked = parser.parse_args()
    if asked.child:
        name, accumulation, phases, rank, folder = asked.child
        package, _, run = CONTESTANTS[name]
        told: Told = {"note": f"{package} is not installed"}
        if importlib.util.find_spec(package) is not None:
            told = run(int(accumulation), int(phases), int(rank), Path(folder))
        sys.stdout.write("\n" + json.dumps(told) + "\n")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children end too
    print(
        f"{'':22} {'acc.':>4}  {'s/step':>6} {'peak MiB':>9}  {'weights':>9} {'gradients':>9} "
        f"{'read':>9} {'written':>9}  known        (GB a step; read and written: disk)"
    )
    for accumulation in asked.accumulations:
        for name in asked.only:
            told = contest(name, accumulation, asked.phases, asked.rivals_python)
            show(name, accumulation, told)
            if "note" not in told:
                phases = asked.phases if name == "windlass" else 1
                append_row(
                    "offload", contestant=name, phases=phases, accumulation=accumulation, **told
                )


if __name__ == "__main__":
    main()
