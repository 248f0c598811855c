"""Step time of models that fit in memory: Windlass against plain loops, the best of each.

    python benchmarks/in_memory.py [--model gpt2-124m] [--rounds 5] [--only NAME ...]
        [--accumulation 1] [--trainer-python PATH]

Each contestant runs in a process of its own, and they take one step in turn, so that changes in
the speed of a shared machine affect all alike. Ratios are computed within a round. All train the
same shape on the same tokens with AdamW and clipping by the global norm:

- `windlass`: the plan that `windlass train` would run, as the planner chose it. Other words of a
  request may follow: `windlass,compile=true` pins one of its choices;
- `PRECISION-ATTENTION-CODE-PAGES`: a plain loop, see `plain_loops.Rival`. The best of those that
  ran is named, and the best of those with our precision (float32 masters);
- `trainer`: the Hugging Face Trainer on its own GPT2LMHeadModel, bfloat16 autocast, fused AdamW;
  left out if its interpreter has no transformers.

`pure` loops keep no float32 weights. Their steps are faster for another result, and count apart.
The table shows how much memory of each process lies in huge pages: what starts last gets the
fewest where memory is short, so name fewer rivals (`--only`) for a large model. Measure the machine
first with `windlass probe`.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from plain_loops import PAGES, Rival, Step, Task, model_dials, plain_loop
from results import append_row
from windlass.atomic_files import cache_folder
from windlass.hardware.local_machine import load_local_machine

TASKS = {
    "gpt2-124m": Task("gpt2-124m", (), micro=4, sequence=512),
    "gpt-tiny": Task("gpt-tiny", (), micro=16, sequence=256),
    "llama-small": Task(
        "llama-tiny",
        ("model.layers=8", "model.width=512", "model.heads=8", "model.kv_heads=4",
         "model.ffn=1408", "model.vocabulary=16384", "model.sequence=512"),
        micro=4, sequence=512,
    ),
    "bert-base": Task("bert-base", (), micro=4, sequence=512),
}  # fmt: skip
RIVALS = (
    "autocast-flash-whole-thp", "autocast-math-whole-glibc", "masters-flash-whole-glibc",
    "masters-math-whole-glibc", "masters-math-eager-glibc", "pure-math-whole-glibc",
)  # fmt: skip
"""Those that are compared if none are named: the usual fast loop, and the fastest that we found."""
VOCABULARY = 50257


def trainer_loop(task: Task, folder: str) -> Step:
    """The Hugging Face Trainer; its own loop runs on a thread and waits before each step."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    start, done = threading.Semaphore(0), threading.Semaphore(0)
    inputs, _ = task.batch(VOCABULARY)
    rows = [{"input_ids": row, "labels": row} for row in inputs]

    class WaitForTurn(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_step_begin(self, *_: object, **__: object) -> None:
            start.acquire()

        def on_step_end(self, *_: object, **__: object) -> None:
            done.release()

    class Endless(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return itertools.cycle(rows)

    arguments = TrainingArguments(
        folder, max_steps=10_000, per_device_train_batch_size=task.micro, use_cpu=True, bf16=True,
        gradient_accumulation_steps=task.accumulation, optim="adamw_torch_fused", report_to=[],
        logging_strategy="no", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Endless(),
                      callbacks=[WaitForTurn()])  # fmt: skip
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> float:
        start.release()
        done.acquire()
        return 0.0

    return step


class ConstantBatches:
    """The same batch at every step, with the interface that the runtime needs."""

    def __init__(self, task: Task, vocabulary: int) -> None:
        self.batch = task.micro * task.accumulation
        self.inputs, self.targets = (part.numpy() for part in task.batch(vocabulary))

    def samples(self, step: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples first to first + count, repeated if the step needs more than there are."""
        del step
        rows = [(first + i) % len(self.inputs) for i in range(count)]
        return self.inputs[rows], self.targets[rows]

    def document_ids(self, step: int, first: int, count: int) -> None:
        """A row is one document."""
        del step, first, count

    def target_counts(self, step: int) -> np.ndarray:
        """Each token is a target."""
        del step
        return np.full(self.batch, self.targets.shape[1])

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """No names: the tokens are random."""
        del step, sample
        return ()


def windlass_loop(task: Task, words: list[str], folder: str) -> Step:
    """The plan that Windlass picks, which is printed.

    Args:
        task: what to train.
        words: further words of the request, which pin choices of the plan.
        folder: for the run's files.
    """
    import windlass
    from windlass.models.build import build_layer_stack
    from windlass.program.lowering.lower import lower
    from windlass.runtime.rank_context import RankContext
    from windlass.runtime.train import train_loop

    batch = task.micro * task.accumulation
    planned = windlass.plan(
        task.model, *task.dials, f"train.sequence={task.sequence}", f"train.batch={batch}",
        "train.steps=10000", "train.evaluate_every=10000", "train.save_every=10000", *words,
    )  # fmt: skip
    stack = build_layer_stack(task.model, model_dials(task), device="meta", seed=0)
    context = RankContext(
        plan=planned.plan, stack=stack, program=lower(planned.plan, planned.graph)[0],
        settings=planned.request.train, checkpoints=Path(folder),
    )  # fmt: skip
    steps = train_loop(context, ConstantBatches(task, stack.vocabulary))
    print(f"plan: {planned.plan.to_toml()}")
    print(f"predicted: {planned.prediction.step_seconds:.4f} s")
    return lambda: next(steps).loss


class Contestant:
    """A process that takes one step on request.

    Args:
        name: `windlass` and words of a request, a `Rival`, or `trainer`.
        python: interpreter of the process.
        task: key of `TASKS`.
        accumulation: micro-batches in a step.
    """

    def __init__(self, name: str, python: str, task: str, accumulation: int) -> None:
        self.name = name
        own = name.startswith("windlass")
        pages = (
            PAGES["plain" if own else "thp"]
            if own or name == "trainer"
            else PAGES[Rival.parse(name).pages]
        )
        self._process = subprocess.Popen(
            [python, __file__, "--child", name, task, str(accumulation)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | pages,
        )  # fmt: skip

    def step(self) -> float:
        """Takes one step and returns its seconds by the process's own clock."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            sys.exit(f"{self.name} ended with {self._process.wait()}")
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{self.name} ended with {self._process.wait()}")
        return float(answer)

    def huge_page_bytes(self) -> int:
        """Bytes of the process that lie in transparent huge pages now."""
        lines = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        line = next(line for line in lines if line.startswith("AnonHugePages:"))
        return int(line.split()[1]) * 1024

    def end(self) -> None:
        """Kills the process, which is waiting for its next turn."""
        self._process.kill()
        self._process.wait()


def wait_for_turns(name: str, task: Task, folder: str) -> None:
    """Runs in a contestant's process: takes a step for each input line and writes its seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    kind, *words = name.split(",")
    if kind == "trainer":
        step = trainer_loop(task, folder)
    elif kind == "windlass":
        step = windlass_loop(task, words, folder)
    else:
        step = plain_loop(task, Rival.parse(name))
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        answers.write(f"{time.perf_counter() - start}\n")
        answers.flush()


def has_transformers(python: str) -> bool:
    """Whether an interpreter has the Trainer and its dependencies."""
    code = "import accelerate, transformers"
    return not subprocess.run([python, "-c", code], capture_output=True, check=False).returncode


def main() -> None:
    """Prints each contestant's median step time and its ratio to Windlass, and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=TASKS, default="gpt2-124m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--trainer-python", default=sys.executable)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, task, accumulation = options.child
        # The parent kills this process, so it is the parent that removes the folder.
        replaced = TASKS[task]._replace(accumulation=int(accumulation))
        wait_for_turns(name, replaced, tempfile.gettempdir())
        return
    asked = options.only or RIVALS
    names = [name for name in asked if name != "windlass"] + ["windlass"]
    if "trainer" in names and not has_transformers(options.trainer_python):
        print(f"trainer: transformers or accelerate is not installed for {options.trainer_python}")
        names.remove("trainer")
    if load_local_machine(cache_folder()) is None:
        sys.exit("measure this machine first: `windlass probe`")
    pythons = {"trainer": options.trainer_python}
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        contestants = [
            Contestant(name, pythons.get(name, sys.executable), options.model, options.accumulation)
            for name in names
        ]
        try:
            seconds = compare(contestants, options.rounds)
            conclude(contestants, seconds, options.model, options.accumulation)
        finally:
            for contestant in contestants:
                contestant.end()


def compare(contestants: list[Contestant], rounds: int) -> dict[str, list[float]]:
    """Warms up every contestant, then times `rounds` interleaved steps of each."""
    for contestant in contestants:
        start = time.perf_counter()
        for _ in range(2):
            contestant.step()
        print(f"{contestant.name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants:
            seconds[contestant.name].append(contestant.step())
        last = ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items())
        print(f"round {number + 1}: {last}", flush=True)
    return seconds


def conclude(
    contestants: list[Contestant], seconds: dict[str, list[float]], model: str, accumulation: int
) -> None:
    """Prints the table and the best rivals, and appends the rows."""
    width = max(len(contestant.name) for contestant in contestants)
    print(f"\n{'':{width}}   median  huge pages  windlass / it (median of rounds, min to max)")
    for contestant in contestants:
        name, times = contestant.name, seconds[contestant.name]
        ratios = sorted(ours / it for ours, it in zip(seconds["windlass"], times, strict=True))
        median_ratio = statistics.median(ratios)
        print(
            f"{name:{width}} {statistics.median(times):7.3f}s"
            f"  {contestant.huge_page_bytes() / 2**20:6.0f} MiB"
            f"  {median_ratio:.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
        append_row(
            "in_memory_best", model=model, contestant=name, accumulation=accumulation,
            rounds=len(times), median_seconds=f"{statistics.median(times):.4f}",
            windlass_over_it=f"{median_ratio:.4f}",
            lowest=f"{ratios[0]:.4f}", highest=f"{ratios[-1]:.4f}",
        )  # fmt: skip
    rivals = {name: times for name, times in seconds.items() if not name.startswith("windlass")}
    same = {name: times for name, times in rivals.items() if not name.startswith("pure")}
    for label, group in (("best rival with float32 weights", same), ("best rival", rivals)):
        if group:
            best = min(group, key=lambda name: statistics.median(group[name]))
            pairs = zip(seconds["windlass"], group[best], strict=True)
            print(f"{label}: {best}, ratio {statistics.median(a / b for a, b in pairs):.3f}")


if __name__ == "__main__":
    main()
