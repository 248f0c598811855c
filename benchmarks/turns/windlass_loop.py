"""Steps of the plan that Windlass picks, one at a time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turns.contestants import Step
from turns.plain_loops import Task, model_dials


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


def windlass_loop(task: Task, words: Sequence[str], folder: str) -> Step:
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
    from windlass.torch_ext import device_for

    batch = task.micro * task.accumulation
    planned = windlass.plan(
        task.model, *task.dials, f"train.sequence={task.sequence}", f"train.batch={batch}",
        "train.steps=10000", "train.evaluate_every=10000", "train.save_every=10000", *words,
    )  # fmt: skip
    model = planned.plan.model
    stack = build_layer_stack(
        task.model, model_dials(task), device="meta", seed=0, lora=model and model.lora
    )
    device = device_for(planned.machine.device.kind)
    device.activate()
    context = RankContext(
        device=device, plan=planned.plan, stack=stack,
        program=lower(planned.plan, planned.graph)[0], settings=planned.request.train,
        checkpoints=Path(folder),
    )  # fmt: skip
    steps = train_loop(context, ConstantBatches(task, stack.vocabulary))
    print(f"plan: {planned.plan.to_toml()}")
    prediction, peak_bytes = planned.prediction, planned.prediction.peaks[0].peak_bytes
    print(f"predicted: {prediction.step_seconds:.4f} s, {peak_bytes / 2**20:.0f} MiB")

    def step() -> float:
        loss = next(steps).loss
        device.synchronize()
        return loss

    def figures() -> dict[str, float]:
        peak = device.peak_memory()
        device.reset_peak_memory()
        moved = prediction.offload
        return {
            "peak_bytes": peak, "predicted_peak_bytes": peak_bytes,
            "predicted_seconds": prediction.step_seconds,
            "low_seconds": prediction.low_seconds, "high_seconds": prediction.high_seconds,
            "model_flop": prediction.model_flop, "peak_flop_rate": prediction.peak_flop_rate,
            "streamed_bytes": moved.read_bytes + moved.written_bytes if moved else 0,
        }  # fmt: skip

    step.figures = figures  # type: ignore[attr-defined]
    return step
