"""Step time of a model that fits in memory: Windlass against the usual alternatives.

    python benchmarks/in_memory.py [--rounds 5] [--micro 4] [--accumulation 1]
        [--only NAME ...] [--no-huge-pages] [--trainer-python PATH]

Each contestant runs in a process of its own, and they take one step in turn, so that changes in
the speed of a shared machine affect all alike. Ratios are computed within a round. All train
`gpt2-124m` (the published shape) at sequence length 512 on the same tokens with AdamW and clipping
by the global norm:

- `eager`: a plain PyTorch loop in float32;
- `autocast`: the usual fast loop: bfloat16 autocast, model and loss compiled, fused AdamW;
- `plain-attention`: the same with attention written out as softmax(Q K^T) V and compiled, in place
  of `scaled_dot_product_attention`;
- `pure`: bfloat16 weights without float32 masters, compiled, fused AdamW;
- `trainer`: the Hugging Face Trainer on its own GPT2LMHeadModel, bfloat16 autocast, fused AdamW;
  left out if its interpreter has no transformers;
- `windlass-no-allocator`: the plan that the planner picks, with torch's own CPU allocator;
- `windlass`: the same plan with Windlass's allocator. Both keep float32 masters.

Windlass's allocator uses transparent huge pages. All others get them from torch's own allocator
(`THP_MEM_ALLOC_ENABLE=1`) unless `--no-huge-pages` is given. The table shows how much memory of
each process lies in huge pages. Measure the machine first with `windlass probe`.
"""

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  the field's name for it

from results import append_row
from windlass.atomic_files import cache_folder
from windlass.hardware.local_machine import load_local_machine

SEQUENCE = 512
VOCABULARY = 50257
Step = Callable[[], float]
CONTESTANTS = (
    "eager", "autocast", "plain-attention", "pure", "trainer", "windlass-no-allocator", "windlass",
)  # fmt: skip


def tokens(batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of random tokens and their successors, `[b s]` each."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, VOCABULARY, (batch, SEQUENCE + 1), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def plain_model() -> nn.Sequential:
    """GPT-2 124M as one plain module with its tied head."""
    from windlass.models.build import build_layer_stack

    stack = build_layer_stack("gpt2-124m", {}, device="cpu", seed=0)
    model = nn.Sequential(*stack.layers)
    layers = dict(zip(stack.names, stack.layers, strict=True))
    for tied, owner in stack.tied_weights.items():
        (layer, _, name), (owner_layer, _, owner_name) = tied.partition("."), owner.partition(".")
        module, _, leaf = name.rpartition(".")
        weight = layers[owner_layer].get_parameter(owner_name)
        setattr(layers[layer].get_submodule(module), leaf, weight)
    return model


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, **_: object
) -> torch.Tensor:
    """Attention as written by hand, softmax(Q K^T) V; maps `[b h s k]` to `[b h s k]`."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if is_causal:
        length = scores.shape[-1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ value


def plain_loop(batch: int, accumulation: int, mode: str) -> Step:
    """A hand-written loop; `mode` is eager, autocast, plain-attention or pure."""
    if mode == "plain-attention":
        F.scaled_dot_product_attention = plain_attention  # the layers look it up by this name
    model = plain_model()
    if mode == "pure":
        model.to(torch.bfloat16)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())

    run = loss_of if mode == "eager" else torch.compile(loss_of)
    autocast = mode in {"autocast", "plain-attention"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=mode != "eager")
    inputs, targets = tokens(batch)

    def step() -> float:
        for _ in range(accumulation):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = run(inputs, targets)
            (loss / accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def trainer_loop(batch: int, accumulation: int, folder: str) -> Step:
    """The Hugging Face Trainer; its own loop runs on a thread and waits before each step."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    start, done = threading.Semaphore(0), threading.Semaphore(0)
    inputs, _ = tokens(batch)
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
        folder, max_steps=10_000, per_device_train_batch_size=batch, use_cpu=True, bf16=True,
        gradient_accumulation_steps=accumulation, optim="adamw_torch_fused", report_to=[],
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

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.inputs, self.targets = (part.numpy() for part in tokens(batch))

    def samples(self, step: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples first to first + count, repeated if the step needs more than there are."""
        del step
        rows = [(first + i) % len(self.inputs) for i in range(count)]
        return self.inputs[rows], self.targets[rows]

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """No names: the tokens are random."""
        del step, sample
        return ()


def windlass_loop(batch: int, accumulation: int, folder: str, *, own_allocator: bool) -> Step:
    """The plan that Windlass picks, which is printed.

    Args:
        batch: sequences in a micro-batch.
        accumulation: micro-batches in a step.
        folder: for the run's files.
        own_allocator: whether Windlass's allocator replaces torch's, as it does by default.
    """
    import windlass
    from windlass.models.build import build_layer_stack
    from windlass.program.lowering.lower import lower
    from windlass.runtime.rank_context import RankContext
    from windlass.runtime.train import train_loop
    from windlass.torch_ext import cpu_allocator

    if not own_allocator:  # install_allocator then changes nothing
        cpu_allocator._library = cpu_allocator._keep_heap = lambda: None  # noqa: SLF001
    planned = windlass.plan(
        "gpt2-124m", f"train.sequence={SEQUENCE}", f"train.batch={batch * accumulation}",
        "train.steps=10000", "train.evaluate_every=10000", "train.save_every=10000",
        f"batch.micro={batch}", f"batch.accumulation={accumulation}",
    )  # fmt: skip
    stack = build_layer_stack("gpt2-124m", {}, device="meta", seed=0)
    context = RankContext(
        plan=planned.plan, stack=stack, program=lower(planned.plan, planned.graph)[0],
        settings=planned.request.train, checkpoints=Path(folder),
    )  # fmt: skip
    steps = train_loop(context, ConstantBatches(batch * accumulation))
    plan = planned.plan
    print(f"plan: {plan.precision}, compile {plan.compile}, {plan.recompute} recompute")
    return lambda: next(steps).loss


class Contestant:
    """A process that takes one step on request.

    Args:
        name: one of `CONTESTANTS`.
        python: interpreter of the process.
        micro: sequences in a micro-batch.
        accumulation: micro-batches in a step.
        huge_pages: whether torch's allocator uses transparent huge pages.
    """

    def __init__(
        self, name: str, python: str, micro: int, accumulation: int, *, huge_pages: bool
    ) -> None:
        self.name = name
        self.huge_pages = huge_pages and name != "windlass"
        self._process = subprocess.Popen(
            [python, __file__, "--child", name, str(micro), str(accumulation)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"THP_MEM_ALLOC_ENABLE": "1" if self.huge_pages else "0"},
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


def wait_for_turns(name: str, micro: int, accumulation: int, folder: str) -> None:
    """Runs in a contestant's process: takes a step for each input line and writes its seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    if name == "trainer":
        step = trainer_loop(micro, accumulation, folder)
    elif name.startswith("windlass"):
        step = windlass_loop(micro, accumulation, folder, own_allocator=name == "windlass")
    else:
        step = plain_loop(micro, accumulation, name)
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--huge-pages", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trainer-python", default=sys.executable)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, micro, accumulation = options.child
        # The parent kills this process, so it is the parent that removes the folder.
        wait_for_turns(name, int(micro), int(accumulation), tempfile.gettempdir())
        return
    names = [name for name in options.only if name != "windlass"] + ["windlass"]
    if "trainer" in names and not has_transformers(options.trainer_python):
        print(f"trainer: transformers or accelerate is not installed for {options.trainer_python}")
        names.remove("trainer")
    if load_local_machine(cache_folder()) is None:
        sys.exit("measure this machine first: `windlass probe`")
    pythons = {"trainer": options.trainer_python}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        contestants = [
            Contestant(
                name,
                pythons.get(name, sys.executable),
                options.micro,
                options.accumulation,
                huge_pages=options.huge_pages,
            )
            for name in names
        ]
        try:
            seconds = compare(contestants, options.rounds)
            conclude(contestants, seconds, options.micro, options.accumulation)
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
    contestants: list[Contestant], seconds: dict[str, list[float]], micro: int, accumulation: int
) -> None:
    """Prints the table and appends its rows."""
    print(f"\n{'':22} {'median':>8}  huge pages  windlass / it (median of rounds, min to max)")
    for contestant in contestants:
        name, times = contestant.name, seconds[contestant.name]
        ratios = sorted(ours / it for ours, it in zip(seconds["windlass"], times, strict=True))
        median_ratio = statistics.median(ratios)
        print(
            f"{name:22} {statistics.median(times):7.2f}s"
            f"  {contestant.huge_page_bytes() / 2**20:6.0f} MiB"
            f"  {median_ratio:.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
        append_row(
            "in_memory", contestant=name + (" +huge-pages" if contestant.huge_pages else ""),
            micro=micro, accumulation=accumulation, rounds=len(times),
            median_seconds=f"{statistics.median(times):.4f}",
            windlass_over_it=f"{median_ratio:.4f}",
            lowest=f"{ratios[0]:.4f}", highest=f"{ratios[-1]:.4f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
