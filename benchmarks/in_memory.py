"""How fast is a step when the model fits: Windlass beside what one would write or pick instead.

    python benchmarks/in_memory.py [--rounds 5] [--micro 4] [--accumulation 1]

One process holds all contestants and takes one step of each in turn, so that the moods of a shared
machine hit all alike; ratios are taken within a round. All train `gpt2-124m` (the published shape)
at sequence 512 on the same tokens with AdamW and clipping by the global norm:

- `eager`: a plain PyTorch loop, float32;
- `autocast`: the usual fast loop: bfloat16 autocast, model and loss compiled whole, fused AdamW;
- `pure`: weights themselves bfloat16 (no float32 masters), compiled whole, fused AdamW;
- `trainer`: the Hugging Face Trainer on its own GPT2LMHeadModel, bfloat16 autocast, fused AdamW;
- `windlass`: the plan that the planner picks for this machine, float32 masters kept.
"""

import argparse
import itertools
import statistics
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


def tokens(batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of random tokens and their successors, `[b s]` each; content costs no time."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, VOCABULARY, (batch, SEQUENCE + 1), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def plain_model() -> nn.Sequential:
    """GPT-2 124M as one plain module with its tied head."""
    from windlass.models.build import build_chain

    chain = build_chain("gpt2-124m", {}, device="cpu", seed=0)
    model = nn.Sequential(*chain.layers)
    parameters = dict(zip(chain.names, chain.layers, strict=True))
    for tied, owner in chain.ties.items():
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

    def at(self, step: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples first..first+count, repeated as often as the accumulation asks."""
        del step
        rows = [(first + i) % len(self.inputs) for i in range(count)]
        return self.inputs[rows], self.targets[rows]

    def documents(self, step: int, sample: int) -> tuple[str, ...]:
        """None: the tokens are random."""
        del step, sample
        return ()


def windlass_loop(batch: int, accumulation: int, folder: str) -> Step:
    """One step of the plan that Windlass picks; it says which."""
    import windlass
    from windlass.models.build import build_chain
    from windlass.program.lower import lower
    from windlass.runtime.train import train

    planned = windlass.plan(
        "gpt2-124m", f"train.sequence={SEQUENCE}", f"train.batch={batch * accumulation}",
        "train.steps=10000", "train.evaluate_every=10000", "train.save_every=10000",
        f"batch.micro={batch}", f"batch.accumulation={accumulation}",
    )  # fmt: skip
    chain = build_chain("gpt2-124m", {}, device="meta", seed=0)
    steps = train(
        planned.plan, chain, Constant(batch * accumulation), planned.request.train,
        program=lower(planned.plan, planned.graph)[0], checkpoints=Path(folder),
    )  # fmt: skip
    plan = planned.plan
    print(f"plan: {plan.precision}, compile {plan.compile}, {plan.stages[0].recompute} recompute")
    return lambda: next(steps).loss


def main() -> None:
    """Prints each contestant's median step and its ratio to Windlass, and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(options.rounds, options.micro, options.accumulation, options.only, folder)


def compare(
    rounds: int, micro: int, accumulation: int, only: list[str] | None, folder: str
) -> None:
    """Warms every contestant up, then times `rounds` interleaved steps of each."""
    makers: dict[str, Callable[[], Step]] = {
        "eager": lambda: plain_loop(micro, accumulation, "eager"),
        "autocast": lambda: plain_loop(micro, accumulation, "autocast"),
        "pure": lambda: plain_loop(micro, accumulation, "pure"),
        "trainer": lambda: trainer_loop(micro, accumulation, folder),
        "windlass": lambda: windlass_loop(micro, accumulation, folder),
    }
    steps: dict[str, Step] = {}
    for name in only or makers:
        begun = time.perf_counter()
        steps[name] = makers[name]()
        for _ in range(2):
            steps[name]()
        print(f"{name}: ready after {time.perf_counter() - begun:.0f} s", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begun)
        last = ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items())
        print(f"round {number + 1}: {last}", flush=True)
    print(f"\n{'':10} {'median':>8}  windlass / it (median of rounds, lowest to highest)")
    for name, times in seconds.items():
        ratios = sorted(ours / it for ours, it in zip(seconds["windlass"], times, strict=True))
        middle = statistics.median(ratios)
        print(
            f"{name:10} {statistics.median(times):7.2f}s"
            f"  {middle:.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
        append_row(
            "in_memory", contestant=name, micro=micro, accumulation=accumulation, rounds=rounds,
            median_seconds=f"{statistics.median(times):.4f}", windlass_over_it=f"{middle:.4f}",
            lowest=f"{ratios[0]:.4f}", highest=f"{ratios[-1]:.4f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
