"""How fast is a step when the model fits: Windlass beside what one would write or pick instead.

    python benchmarks/in_memory.py [--rounds 5] [--micro 4] [--accumulation 1]
        [--trainer-python PATH]

Each contestant waits in a process of its own, where only Windlass has its allocator, and all take
one step in turn, so that the moods of a shared machine hit all alike; ratios are taken within a
round. All train `gpt2-124m` (the published shape) at sequence 512 on the same tokens with AdamW and
clipping by the global norm:

- `eager`: a plain PyTorch loop, float32;
- `autocast`: the usual fast loop: bfloat16 autocast, model and loss compiled whole, fused AdamW;
- `pure`: weights themselves bfloat16 (no float32 masters), compiled whole, fused AdamW;
- `trainer`: the Hugging Face Trainer on its own GPT2LMHeadModel, bfloat16 autocast, fused AdamW;
  left out where its interpreter has no transformers;
- `windlass`: the plan that the planner picks for this machine, float32 masters kept.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  the field's name for it

from results import append_row

SEQUENCE = 512
VOCABULARY = 50257
Step = Callable[[], float]
CONTESTANTS = ("eager", "autocast", "pure", "trainer", "windlass")


def tokens(batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of random tokens and their successors, `[b s]` each; content costs no time."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, VOCABULARY, (batch, SEQUENCE + 1), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def plain_model() -> nn.Sequential:
    """GPT-2 124M as one plain module with its tied head."""
    from windlass.models.build import build_layer_stack

    chain = build_layer_stack("gpt2-124m", {}, device="cpu", seed=0)
    model = nn.Sequential(*chain.layers)
    parameters = dict(zip(chain.names, chain.layers, strict=True))
    for tied, owner in chain.tied_weights.items():
        (layer, _, name), (home, _, source) = tied.partition("."), owner.partition(".")
        module, _, leaf = name.rpartition(".")
        setattr(
            parameters[layer].get_submodule(module), leaf, parameters[home].get_parameter(source)
        )
    return model


def plain_loop(batch: int, accumulation: int, mode: str) -> Step:
    """One optimizer step of a hand-written loop; `mode` is eager, autocast or pure."""
    model = plain_model()
    if mode == "pure":
        model.to(torch.bfloat16)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())

    run = loss_of if mode == "eager" else torch.compile(loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=mode != "eager")
    inputs, targets = tokens(batch)

    def step() -> float:
        for _ in range(accumulation):
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                loss = run(inputs, targets)
            (loss / accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def trainer_loop(batch: int, accumulation: int, folder: str) -> Step:
    """One optimizer step of the Hugging Face Trainer, run in its own loop on another thread."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    go, done = threading.Semaphore(0), threading.Semaphore(0)
    inputs, _ = tokens(batch)
    rows = [{"input_ids": row, "labels": row} for row in inputs]

    class Turns(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_step_begin(self, *_: object, **__: object) -> None:
            go.acquire()

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
                      callbacks=[Turns()])  # fmt: skip
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> float:
        go.release()
        done.acquire()
        return 0.0

    return step


class Constant:
    """The same batch at every step, in the form that the runtime asks for."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.inputs, self.targets = (part.numpy() for part in tokens(batch))

    def samples(self, step: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples first..first+count, repeated as often as the accumulation asks."""
        del step
        rows = [(first + i) % len(self.inputs) for i in range(count)]
        return self.inputs[rows], self.targets[rows]

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """None: the tokens are random."""
        del step, sample
        return ()


def windlass_loop(batch: int, accumulation: int, folder: str) -> Step:
    """One step of the plan that Windlass picks; it says which."""
    import windlass
    from windlass.models.build import build_layer_stack
    from windlass.program.lowering.lower import lower
    from windlass.runtime.rank_context import RankContext
    from windlass.runtime.train import train

    planned = windlass.plan(
        "gpt2-124m", f"train.sequence={SEQUENCE}", f"train.batch={batch * accumulation}",
        "train.steps=10000", "train.evaluate_every=10000", "train.save_every=10000",
        f"batch.micro={batch}", f"batch.accumulation={accumulation}",
    )  # fmt: skip
    chain = build_layer_stack("gpt2-124m", {}, device="meta", seed=0)
    context = RankContext(
        plan=planned.plan, stack=chain, program=lower(planned.plan, planned.graph)[0],
        settings=planned.request.train, checkpoints=Path(folder),
    )  # fmt: skip
    steps = train(context, Constant(batch * accumulation))
    plan = planned.plan
    print(f"plan: {plan.precision}, compile {plan.compile}, {plan.recompute} recompute")
    return lambda: next(steps).loss


class Contestant:
    """A process that takes one step whenever it is told to.

    Args:
        name: which contestant.
        python: the interpreter that it runs in.
        micro: sequences in a micro-batch.
        accumulation: micro-batches in a step.
    """

    def __init__(self, name: str, python: str, micro: int, accumulation: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, __file__, "--child", name, str(micro), str(accumulation)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def step(self) -> float:
        """Seconds of one step, by the process's own clock."""
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

    def end(self) -> None:
        """Ends the process; it may be in the middle of nothing but waiting."""
        self._process.kill()
        self._process.wait()


def wait_for_turns(name: str, micro: int, accumulation: int, folder: str) -> None:
    """What a contestant's process does: a step for each line that comes, its seconds as answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if name == "trainer":
        step = trainer_loop(micro, accumulation, folder)
    elif name == "windlass":
        step = windlass_loop(micro, accumulation, folder)
    else:
        step = plain_loop(micro, accumulation, name)
    for _ in sys.stdin:
        begun = time.perf_counter()
        step()
        answers.write(f"{time.perf_counter() - begun}\n")
        answers.flush()


def has_transformers(python: str) -> bool:
    """Whether an interpreter finds the Trainer and what it needs."""
    words = "import accelerate, transformers"
    return not subprocess.run([python, "-c", words], capture_output=True, check=False).returncode


def main() -> None:
    """Prints each contestant's median step and its ratio to Windlass, and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--trainer-python", default=sys.executable)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, micro, accumulation = options.child
        # The run's last files are the parent's to remove, for it ends this process at once.
        wait_for_turns(name, int(micro), int(accumulation), tempfile.gettempdir())
        return
    names = [name for name in options.only if name != "windlass"] + ["windlass"]
    if "trainer" in names and not has_transformers(options.trainer_python):
        print(f"trainer: transformers or accelerate is not installed for {options.trainer_python}")
        names.remove("trainer")
    pythons = {"trainer": options.trainer_python}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        contestants = [
            Contestant(name, pythons.get(name, sys.executable), options.micro, options.accumulation)
            for name in names
        ]
        try:
            seconds = compare(contestants, options.rounds)
        finally:
            for contestant in contestants:
                contestant.end()
    conclude(seconds, options.micro, options.accumulation)


def compare(contestants: list[Contestant], rounds: int) -> dict[str, list[float]]:
    """Warms every contestant up, then times `rounds` interleaved steps of each."""
    for contestant in contestants:
        begun = time.perf_counter()
        for _ in range(2):
            contestant.step()
        print(f"{contestant.name}: ready after {time.perf_counter() - begun:.0f} s", flush=True)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants:
            seconds[contestant.name].append(contestant.step())
        last = ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items())
        print(f"round {number + 1}: {last}", flush=True)
    return seconds


def conclude(seconds: dict[str, list[float]], micro: int, accumulation: int) -> None:
    """Prints the table and appends its rows."""
    print(f"\n{'':10} {'median':>8}  windlass / it (median of rounds, lowest to highest)")
    for name, times in seconds.items():
        ratios = sorted(ours / it for ours, it in zip(seconds["windlass"], times, strict=True))
        middle = statistics.median(ratios)
        print(
            f"{name:10} {statistics.median(times):7.2f}s"
            f"  {middle:.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
        append_row(
            "in_memory", contestant=name, micro=micro, accumulation=accumulation, rounds=len(times),
            median_seconds=f"{statistics.median(times):.4f}", windlass_over_it=f"{middle:.4f}",
            lowest=f"{ratios[0]:.4f}", highest=f"{ratios[-1]:.4f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
