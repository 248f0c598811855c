"""Logs in the forms that engines write, whole and damaged; the sources are named in each format."""

import json
from typing import NamedTuple


class LogText(NamedTuple):
    """A log, and what it says."""

    stack: str
    text: str
    steps: int
    """Steps that can be read."""
    loss: float | None
    """Of the last step."""
    seconds: float | None
    """Of the last step, for 65,536 tokens, 8 sequences and 8 ranks."""
    left_out: tuple[str, ...] = ()
    """Beginnings of what is counted as not taken over."""
    suffix: str = "log"


def titan(step: int, tps: str = "8,192", loss: str = "2.50000") -> str:
    return (
        f"[titan] 2026-03-01 10:00:{step % 60:02d},120 - root - INFO - \x1b[31mstep: {step:2}  "
        f"\x1b[32mloss: {loss:>8}  \x1b[38;2;180;60;0mgrad_norm:  1.2500  \x1b[36mmemory: "
        f"47.28GiB(59.71%)  \x1b[34mtps: {tps}  \x1b[36mtflops: 421.50  "
        "\x1b[35mmfu: 42.62%\x1b[0m\n"
    )


def megatron(step: int, ms: float = 1500.0, loss: str = "2.500000E+00") -> str:
    return (
        f" [2026-03-01 10:00:{step % 60:02d}] iteration {step:8d}/    1000 | consumed samples: "
        f"{8 * step:12d} | elapsed time per iteration (ms): {ms:.1f} | throughput per GPU "
        f"(TFLOP/s/GPU): 410.2 | learning rate: 3.000000E-04 | global batch size:     8 | lm loss: "
        f"{loss} | loss scale: 1.0 | grad norm: 1.250 | number of skipped iterations:   0 | number "
        "of nan iterations:   0 |\n"
    )


def memory(rank: int) -> str:
    return (
        f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 20480.0 | max allocated: "
        "40960.0 | reserved: 45056.0 | max reserved: 51200.0\n"
    )


def deepspeed(step: int, rate: float = 4.0) -> str:
    return (
        f"loss: 2.5\n[2026-03-01 10:00:{step % 60:02d},000] [INFO] [timer.py:264:stop] epoch=0/"
        f"micro_step={2 * step}/global_step={step}, RunningAvgSamplesPerSec=3.9, "
        f"CurrSamplesPerSec={rate}, MemAllocated=20.1GB, MaxMemAllocated=40.5GB\n"
    )


def automodel(step: int, tps: float = 32768.0) -> str:
    row = {"step": step, "epoch": 0, "timestamp": f"2026-03-01T10:00:{step:02d}", "loss": 2.5,
           "grad_norm": 1.25, "lr": 3e-4, "mem": 40.5, "tps": tps, "tps_per_gpu": tps / 8,
           "mfu": 40.0, "num_tokens_per_step": 65536, "num_label_tokens": 65000}  # fmt: skip
    return json.dumps(row) + "\n"


def callback(step: int, seconds: float = 2.0) -> str:
    row = {"step": step, "time": 1.8e9 + 2 * step, "seconds": seconds, "loss": 2.5,
           "tokens": 65536, "allocated_bytes": 40 * 2**30,
           "reserved_bytes": 50 * 2**30}  # fmt: skip
    return json.dumps(row) + "\n"


def trainer(steps: range) -> str:
    history = [
        {"epoch": 0.1, "grad_norm": 1.25, "learning_rate": 3e-4, "loss": 2.5, "step": step}
        for step in steps
    ]
    history.append({"epoch": 0.1, "step": steps[-1], "train_runtime": 20.0, "train_loss": 2.5})
    return json.dumps({"global_step": steps[-1], "log_history": history})


def mllog(step: int, seconds: float = 2.0) -> str:
    entry = {"namespace": "", "time_ms": 1_800_000_000_000 + 2000 * step, "event_type":
             "POINT_IN_TIME", "key": "tracked_stats", "value": {"train_step_time": seconds,
             "reduced_train_loss": 2.5}, "metadata": {"file": "x.py", "step": step}}  # fmt: skip
    return f":::MLLOG {json.dumps(entry)}\n"


def many(line: object, last: int = 6) -> str:
    return "".join(line(step) for step in range(1, last + 1))  # type: ignore[operator]


_SETUP = "W0301 10:00:00.1 torch/distributed/run.py:774] Setting OMP_NUM_THREADS\n[rank0]: hello\n"

LOGS = {
    "torchtitan": LogText("torchtitan", many(titan), 6, 2.5, 1.0),
    "torchtitan with its setup": LogText("torchtitan", _SETUP + many(titan), 6, 2.5, 1.0),
    "torchtitan by torchrun": LogText(
        "torchtitan", "".join(f"[rank0]:{line}" for line in many(titan).splitlines(True)),
        6, 2.5, 1.0,
    ),
    "torchtitan, each tenth step": LogText(
        "torchtitan", "".join(titan(10 * step) for step in range(1, 7)), 6, 2.5, 1.0
    ),
    "torchtitan, fast": LogText("torchtitan", many(lambda s: titan(s, "16,384")), 6, 2.5, 0.5),
    "torchtitan of version 0.3.0": LogText("torchtitan@0.3.0", many(titan), 6, 2.5, 1.0),
    "megatron": LogText("megatron-lm", many(megatron), 6, 2.5, 1.5),
    "megatron with memory": LogText(
        "megatron-lm", megatron(1) + memory(0) + many(megatron)[len(megatron(1)) :], 6, 2.5, 1.5
    ),
    "bridge": LogText("megatron-bridge", many(megatron), 6, 2.5, 1.5),
    "nemo": LogText("nemo", many(megatron), 6, 2.5, 1.5),
    "megatron, small loss": LogText(
        "megatron", many(lambda s: megatron(s, loss="7.250000E-02")), 6, 0.0725, 1.5
    ),
    "deepspeed": LogText("deepspeed", many(deepspeed), 6, None, 2.0),
    "deepspeed, slow": LogText("deepspeed", many(lambda s: deepspeed(s, 1.0)), 6, None, 8.0),
    "automodel": LogText("automodel", many(automodel), 6, 2.5, 2.0, suffix="jsonl"),
    "accelerate": LogText("accelerate", many(callback), 6, 2.5, 2.0, suffix="jsonl"),
    "trainer": LogText(
        "transformers", trainer(range(1, 7)), 6, 2.5, None, ("1 other", "5 steps whose"), "json"
    ),
    "trainer, each tenth step": LogText(
        "transformers", trainer(range(10, 70, 10)), 6, 2.5, None, ("1 other", "5 steps whose"),
        "json",
    ),
    "mllog": LogText("mllog", many(mllog), 6, 2.5, 2.0),
    "mllog among lines": LogText("mllog", "starting\n" + many(mllog), 6, 2.5, 2.0),
    "mllog with other keys": LogText(
        "mllog", ':::MLLOG {"key": "seed", "value": 7}\n' + many(mllog), 6, 2.5, 2.0, ("1 other",)
    ),
    "a restart repeats steps": LogText(
        "torchtitan", many(titan) + titan(4) + titan(5) + titan(6), 6, 2.5, 1.0, ("3 steps that",)
    ),
    "a cut end": LogText("torchtitan", many(titan) + titan(7)[:70], 6, 2.5, 1.0, ("1 damaged",)),
    "ranks that interleave": LogText(
        "torchtitan",
        "".join(f"[rank{rank}]:{titan(step)}" for step in range(1, 7) for rank in (0, 1)),
        6, 2.5, 1.0, ("6 lines of other",),
    ),
    "two records in a line": LogText(
        "megatron", many(megatron, 4) + megatron(5).rstrip("\n") + megatron(6), 6, 2.5, 1.5
    ),
    "a record cut by another": LogText(
        "megatron", many(megatron, 5) + megatron(6)[:60] + megatron(6), 6, 2.5, 1.5, ("1 damaged",)
    ),
    "bytes that are no text": LogText("megatron", many(megatron) + "\udcff\udcfe\n", 6, 2.5, 1.5),
    "a loss that is no number": LogText(
        "torchtitan", many(titan, 5) + titan(6, loss="nan"), 6, float("nan"), 1.0
    ),
    "a JSON line cut off": LogText(
        "automodel", many(automodel) + automodel(7)[:40], 6, 2.5, 2.0, ("1 damaged",), "jsonl"
    ),
    "a very long line": LogText(
        "deepspeed", "x" * 200_000 + "\n" + many(deepspeed), 6, None, 2.0, ("1 lines that",)
    ),
    "JSON that is no step": LogText(
        "accelerate", "[1]\n7\nnull\n" + many(callback), 6, 2.5, 2.0, ("3 other",), "jsonl"
    ),
    "a slow first step": LogText(
        "accelerate", callback(1, 60.0) + many(callback)[len(callback(1)) :], 6, 2.5, 2.0,
        suffix="jsonl",
    ),
}  # fmt: skip
