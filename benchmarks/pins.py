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
MODELS = ("gpt2-355m", "gpt2-1.5b", "bert-large", "llama2-7b", "llama2-13b", "vit-b16")
MACHINES = ("dgx-h100", "dgx-a100-40gb", "dgx-a100-40gb:2", "ipu-m2000", "ipu-pod16", "cs-2")
PINS = (
    "parallel.context=2", "parallel.context=1", "parallel.pipeline=1", "parallel.pipeline=2",
    "parallel.pipeline=4", "parallel.data=2", "parallel.data=4", "parallel.tensor=1",
    "parallel.tensor=2", "parallel.tensor=4", "parallel.schedule=gpipe",
    "parallel.schedule=interleaved", "parallel.schedule=zero-bubble",
    "parallel.virtual_stages=2", "parallel.virtual_stages=5", "recompute=full",
    "recompute=selective", "recompute=none", "sharding.parameters=2", "sharding.optimizer=4",
    "batch.micro=1", "batch.micro=4", "phases=1", "phases=4", "phases=9", "compile=true",
    "precision=bfloat16", "offload.optimizer=device", "offload.optimizer=host",
)  # fmt: skip


def answer(model: str, machine: str, *overrides: str) -> tuple[float, str]:
    """Seconds of a step of the proved fastest plan, infinite if none fits, and a line on it."""
    begin = time.process_time()
    try:
        request = make_request(model, "margin=0", *overrides, machine=machine)
        planned = plan_request(request, NO_OBJECTS, None, cache=False, explains=False)
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
    """Random requests with random single and double pins."""
    chance = random.Random(seed)
    return [
        (
            chance.choice(MODELS),
            chance.choice(MACHINES),
            (f"train.batch={chance.choice((8, 32, 96, 256))}",),
            tuple(" ".join(chance.sample(PINS, k=chance.choice((1, 2)))) for _ in range(pins)),
        )
        for _ in range(count)
    ]


def main() -> None:
    """Prints each row, the pins that are faster marked."""
    words = sys.argv[1:]
    if words[:1] == ["--random"]:
        rows = random_rows(*map(int, words[1:]))
    else:
        rows = [ROWS[int(each)] for each in words] or list(ROWS)
    for row, (model, machine, question, pins) in enumerate(rows):
        seconds, shown = answer(model, machine, *question)
        print(f"{row} {model} on {machine} {' '.join(question)}\n   {seconds:9.3f} s {shown}")
        for pin in pins:
            keys = {each.partition("=")[0] for each in pin.split()}
            rest = [each for each in question if each.partition("=")[0] not in keys]
            pinned, shown = answer(model, machine, *rest, *pin.split())
            mark = "<<" if pinned < seconds * (1 - 1e-9) else "  "
            print(f" {mark}{pinned:9.3f} s {pin} {shown}", flush=True)


if __name__ == "__main__":
    main()
