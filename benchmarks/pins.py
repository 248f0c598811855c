"""Whether the planner's own choice is ever slower than what it finds with parts of it pinned.

    python benchmarks/pins.py [ROW ...]

Each row asks a question open and then with pins; a pin only takes plans away, so no pinned answer
is faster. `open` and `pinned` are predicted seconds of a step, and CPU seconds of the search.
"""

import sys
import time

from windlass import api
from windlass.errors import WindlassError

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
)  # fmt: skip


def answer(model: str, machine: str, *overrides: str) -> tuple[float, str]:
    """Seconds of a step of the planner's choice, infinite if it has none, and a line on it."""
    begin = time.process_time()
    try:
        planned = api.plan(model, *overrides, machine=machine, cache=False)
    except WindlassError as error:
        return float("inf"), f"{error}".replace("\n", " ")[:200]
    took = f"[{time.process_time() - begin:.1f} s]"
    if planned.result.plan is None:
        advice = planned.result.advice
        return float(
            "inf"
        ), f"{took} does not fit: {advice and advice.needed_bytes / 2**30:.2f} GiB"
    plan, step = planned.plan, planned.prediction.step_seconds
    parallel = ", ".join(f"{key} {value}" for key, value in plan.parallel if value not in (None, 1))
    return step, (
        f"{took} {parallel}; shards {plan.sharding.parameters}/{plan.sharding.optimizer}, micro "
        f"{plan.batch.micro} x {plan.batch.accumulation}, phases {len(plan.stages[0].phases)}, "
        f"{'compiled ' if plan.compile else ''}recompute {plan.recompute}"
    )


def main() -> None:
    """Prints each row, the pins that are faster marked."""
    wanted = [int(each) for each in sys.argv[1:]] or range(len(ROWS))
    for row in wanted:
        model, machine, question, pins = ROWS[row]
        seconds, words = answer(model, machine, *question)
        print(f"{row} {model} on {machine} {' '.join(question)}\n   {seconds:9.3f} s {words}")
        for pin in pins:
            keys = {each.partition("=")[0] for each in pin.split()}
            rest = [each for each in question if each.partition("=")[0] not in keys]
            pinned, words = answer(model, machine, *rest, *pin.split())
            mark = "<<" if pinned < seconds * (1 - 1e-9) else "  "
            print(f" {mark}{pinned:9.3f} s {pin} {words}", flush=True)


if __name__ == "__main__":
    main()
