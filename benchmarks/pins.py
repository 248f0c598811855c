"""Whether the planner's own choice is ever slower than what it finds with parts of it pinned.

    python benchmarks/pins.py [ROW ...]
    python benchmarks/pins.py --random SEED COUNT PINS

Each row asks a question open and then with pins; a pin only takes plans away, so no pinned answer
is faster (`<<`). Random requests have single and double pins. A line has predicted seconds of a
step, CPU seconds of the search, and the plan.
"""

import random
import sys
import time

from windlass.errors import WindlassError
from windlass.jobs.objects import NO_OBJECTS
from windlass.jobs.planned import make_request, plan_request
from windlass.planner import Findings

ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("gpt2-1.5b", "ipu-pod16", ("train.batch=256",),
     ("parallel.context=2", "recompute=selective", "parallel.context=1")),
    ("bert-large", "ipu-pod16", ("train.batch=1536", "train.sequence=512"),
     ("parallel.schedule=gpipe", "sharding.parameters=8")),
    ("llama3.1-8b", "dgx-h100:4", ("train.sequence=131072", "train.batch=32"),
     ("parallel.context=8",)),
    ("llama3-70b", "dgx-h100:32", ("train.sequence=8192", "train.batch=512"),
     ("parallel.context=2",)),
    ("qwen3-30b-a3b", "dgx-h100:2", ("train.batch=256",),
     ("parallel.schedule=gpipe recompute=full",)),
    ("mixtral-8x7b", "dgx-h100:4", ("train.batch=256",),
     ("parallel.context=2 parallel.virtual_stages=1",)),
    ("megatron-530b", "ipu-pod256", ("train.batch=256", "train.sequence=1024"),
     ("parallel.tensor=16x16",)),
    ("megatron-1t", "ipu-pod256",
     ("train.batch=256", "train.sequence=1024", "precision=bfloat16", "moments=int8"),
     ("parallel.tensor=32x8",)),
    ("llama2-13b", "dgx-a100-40gb", ("stack=fsdp", "train.sequence=2048", "train.batch=8"),
     ("recompute=full", "sharding.parameters=8 sharding.optimizer=8 recompute=full")),
    ("llama2-13b", "dgx-a100-40gb", ("stack=torchtitan", "train.sequence=2048", "train.batch=8"),
     ("recompute=full",)),
    ("llama2-13b", "dgx-a100-40gb",
     ("stack=deepspeed-zero3", "train.sequence=2048", "train.batch=8"), ("recompute=full",)),
    ("llama2-7b", "dgx-a100-40gb",
     ("stack=fsdp", "train.sequence=2048", "train.batch=8", "memory=22.4GiB"),
     ("recompute=full",)),
    ("gpt3-175b", "cs-2", ("train.batch=256",), ("train.batch=32",)),
    ("gpt3-175b", "ipu-pod256", (), ("parallel.pipeline=2",)),
    ("bert-large", "ipu-pod16", ("train.batch=1536", "train.sequence=512"),
     ("parallel.pipeline=8",)),
    ("gpt3-13b", "ipu-pod256", ("train.batch=256",), ("offload.optimizer=device",)),
)  # fmt: skip
JOBS: tuple[tuple[str, str, str], ...] = (
    ("gpt2-355m", "dgx-a100-40gb", "train.batch=64"),
    ("gpt2-1.5b", "ipu-pod16", "train.batch=32"),
    ("bert-large", "ipu-m2000", "train.batch=32"),
    ("llama2-7b", "dgx-h100", "train.batch=32"),
    ("llama2-13b", "dgx-a100-40gb:2", "train.batch=96"),
    ("vit-b16", "dgx-a100-40gb", "train.batch=256"),
    ("gpt3-6.7b", "cs-2", "train.batch=96"),
    ("gpt2-1.5b", "cs-2", "train.batch=8"),
    ("moe-tiny", "ipu-m2000", "train.batch=32"),
    ("mixtral-8x7b", "dgx-h100:2", "train.batch=64"),
    ("llama3.2-1b", "dgx-h100", "train.batch=8 train.sequence=65536"),
    ("mistral-7b", "dgx-h100", "train.batch=16 train.sequence=32768"),
    ("gpt2-124m", "here", "train.batch=8"),
    ("gpt-mini", "here", "train.batch=16 memory=1GiB"),
    ("bert-tiny", "here", "train.batch=64"),
    ("gpt3-1.3b", "ipu-m2000", "train.batch=16 sparsity.level=0.75"),
    ("gpt2-355m", "ipu-pod16", "train.batch=64 sparsity.level=0.9"),
    ("llama2-7b", "dgx-a100-40gb", "train.batch=32 stack=fsdp"),
    ("llama2-7b", "dgx-h100", "train.batch=64 stack=torchtitan"),
    ("gpt3-6.7b", "dgx-a100-80gb", "train.batch=64 stack=megatron-core"),
    ("gpt3-6.7b", "dgx-v100-32gb", "train.batch=32 stack=megatron-2021"),
    ("gpt-j-6b", "cs-2", "train.batch=64 stack=modelzoo"),
    ("llama3-8b", "dgx-h100", "train.batch=64 stack=nemo"),
    ("bert-large", "ipu-pod16", "train.batch=96 stack=popart"),
    ("gpt2-355m", "rtx-4090-pc:2", "train.batch=64"),
    ("qwen2.5-0.5b", "a100-40gb", "train.batch=16"),
    ("gemma3-1b", "dgx-h100", "train.batch=32"),
    ("gpt2-774m", "v100", "train.batch=16"),
    ("modernbert-large", "g5-48xlarge", "train.batch=64"),
    ("vit-l16", "ipu-m2000", "train.batch=64"),
    ("smollm2-360m", "bow-pod16", "train.batch=64"),
    ("resnet-50", "ipu-m2000", "train.batch=64"),
)  # fmt: skip
"""Model, machine and pins that a random request has one of."""
PINS = (
    "parallel.context=2", "parallel.context=1", "parallel.pipeline=1", "parallel.pipeline=2",
    "parallel.pipeline=4", "parallel.data=2", "parallel.data=4", "parallel.tensor=1",
    "parallel.tensor=2", "parallel.tensor=4", "parallel.schedule=gpipe",
    "parallel.schedule=interleaved", "parallel.schedule=zero-bubble", "parallel.schedule=1f1b",
    "parallel.virtual_stages=2", "parallel.virtual_stages=5", "parallel.expert=2",
    "parallel.pipeline=3", "parallel.tensor=2x2", "recompute=full", "recompute=selective",
    "recompute=none", "recompute_layers=3", "sharding.parameters=2", "sharding.optimizer=4",
    "sharding.reshard=true", "batch.micro=1", "batch.micro=4", "phases=1", "phases=4", "phases=9",
    "compile=true", "compile=false", "precision=bfloat16", "offload.optimizer=device",
    "offload.optimizer=host",
)  # fmt: skip


def answer(
    model: str, machine: str, *overrides: str, findings: Findings | None = None
) -> tuple[float, str]:
    """Seconds of a step of the proved fastest plan, infinite if none fits, and a line on it."""
    begin = time.process_time()
    try:
        request = make_request(model, "margin=0", *overrides, machine=machine)
        planned = plan_request(
            request, NO_OBJECTS, None, cache=False, explains=False, findings=findings
        )
    except WindlassError as error:
        return float("inf"), f"{error}".replace("\n", " ")[:200]
    took = f"[{time.process_time() - begin:.1f} s]"
    if planned.result.plan is None:
        advice = planned.result.advice
        needed = advice.needed_bytes / 2**30 if advice else float("nan")
        return float("inf"), f"{took} does not fit: {needed:.2f} GiB"
    plan, step = planned.plan, planned.prediction.step_seconds
    parallel = ", ".join(f"{key} {value}" for key, value in plan.parallel if value not in (None, 1))
    return step, (
        f"{took} {parallel}; shards {plan.sharding.parameters}/{plan.sharding.optimizer}, micro "
        f"{plan.batch.micro} x {plan.batch.accumulation}, phases {len(plan.stages[0].phases)}, "
        f"{'compiled ' if plan.compile else ''}recompute {plan.recompute}"
    )


def random_rows(
    seed: int, count: int, pins: int
) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    """Random requests, each with random single and double pins."""
    chance, rows = random.Random(seed), []
    for model, machine, asked in chance.sample(JOBS, k=count):
        named = [" ".join(chance.sample(PINS, k=chance.choice((1, 2)))) for _ in range(pins)]
        rows.append((model, machine, tuple(asked.split()), tuple(named)))
    return rows


def main() -> None:
    """Prints each row, the pins that are faster marked."""
    words = sys.argv[1:]
    if words[:1] == ["--random"]:
        rows = random_rows(*map(int, words[1:]))
    else:
        rows = [ROWS[int(each)] for each in words] or list(ROWS)
    for row, (model, machine, question, pins) in enumerate(rows):
        findings = Findings()
        seconds, shown = answer(model, machine, *question, findings=findings)
        print(f"{row} {model} on {machine} {' '.join(question)}\n   {seconds:9.3f} s {shown}")
        for pin in pins:
            keys = {each.partition("=")[0] for each in pin.split()}
            rest = [each for each in question if each.partition("=")[0] not in keys]
            pinned, shown = answer(model, machine, *rest, *pin.split(), findings=findings)
            mark = "<<" if pinned < seconds * (1 - 1e-9) else "  "
            print(f" {mark}{pinned:9.3f} s {pin} {shown}", flush=True)


if __name__ == "__main__":
    main()
