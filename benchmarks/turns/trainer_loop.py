"""Steps of the Hugging Face Trainer, one at a time."""

import itertools
import threading
from collections.abc import Iterator

import torch
from torch import nn

from turns.contestants import Step
from turns.plain_loops import Task


def trainer_loop(
    task: Task, model: nn.Module, vocabulary: int, folder: str, *, rate: float, **settings: object
) -> Step:
    """Steps of the Trainer, whose own loop runs on a thread and waits before each of them.

    Args:
        task: batch and sequence.
        model: one of `transformers`, or of `peft` around it.
        vocabulary: tokens are drawn from so many.
        folder: for what the Trainer writes.
        rate: learning rate.
        settings: further `TrainingArguments`.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    start, done = threading.Semaphore(0), threading.Semaphore(0)
    inputs, _ = task.batch(vocabulary)
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
        folder, max_steps=10_000, per_device_train_batch_size=task.micro, use_cpu=True,
        learning_rate=rate, gradient_accumulation_steps=task.accumulation,
        optim="adamw_torch_fused", report_to=[], logging_strategy="no", save_strategy="no",
        disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Endless(), callbacks=[WaitForTurn()])
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> float:
        start.release()
        done.acquire()
        return 0.0

    return step
