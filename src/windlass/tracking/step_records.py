"""Converts steps to journal records and back: a row for each step, events for what is rare."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from windlass.schema import Step
from windlass.tracking.journal import Journal, JournalEvent, JournalRow, JournalWriter

_DEVICE_MEMORY = "device_memory_bytes"
_CONTENTION = "contention"
_CPU_SECONDS = "cpu_seconds"
_LOSS_SCALE = "loss_scale"
_DROPPED_SHARE = "dropped_share"
_KIND_PREFIX, _ARRIVAL_PREFIX = "seconds.", "arrival."
"""Precede an instruction kind in the names of a row."""
_TASK_PREFIX = "task."
"""Precedes a task and one of its metrics."""


def append_step(journal: JournalWriter, step: Step) -> None:
    """Appends one step: a row, and one event each for an evaluation and a checkpoint.

    Raises:
        RecordError: the journal was deleted or moved.
    """
    journal.append_row(
        step.step,
        {
            "loss": step.loss,
            "gradient_norm": step.gradient_norm,
            "learning_rate": step.learning_rate,
            "tokens": step.tokens,
            "seconds": step.seconds,
            "memory_bytes": step.memory_bytes,
            "read_bytes": step.read_bytes,
            "written_bytes": step.written_bytes,
            "flush_seconds": step.flush_seconds,
            **_optional(_DEVICE_MEMORY, step.device_memory_bytes),
            **_optional(_CONTENTION, step.contention),
            **_optional(_CPU_SECONDS, step.cpu_seconds),
            **_optional(_LOSS_SCALE, step.loss_scale),
            **_optional(_DROPPED_SHARE, step.dropped_share),
            **{_KIND_PREFIX + kind: seconds for kind, seconds in step.by_kind.items()},
            **{_ARRIVAL_PREFIX + kind: seconds for kind, seconds in step.arrivals.items()},
            **{_TASK_PREFIX + metric: value for metric, value in step.task_scores.items()},
        },
    )
    if step.held_out_loss is not None:
        evaluation = {"step": step.step, "loss": step.held_out_loss}
        if step.held_out_bits_per_byte is not None:
            evaluation["bits_per_byte"] = step.held_out_bits_per_byte
        if step.held_out_loss_ema is not None:
            evaluation["loss_ema"] = step.held_out_loss_ema
        if step.held_out_accuracy is not None:
            evaluation["accuracy"] = step.held_out_accuracy
        if step.held_out_sentence_loss is not None:
            evaluation["sentence_loss"] = step.held_out_sentence_loss
        journal.append_event("evaluation", evaluation)
    if step.expert_load:
        loads = {name: list(load) for name, load in step.expert_load.items()}
        journal.append_event("experts", {"step": step.step, "tokens": loads})
    if step.saved is not None:
        journal.append_event("checkpoint", {"step": step.step, "name": step.saved})


def read_steps(journals: Iterable[Journal]) -> tuple[Step, ...]:
    """The steps of a run, in order.

    Args:
        journals: the journals of one rank in the order of attempts. A later attempt replaces all
            earlier steps from its own first step on.
    """
    steps: list[Step] = []
    for journal in journals:
        if journal.rows:
            first = journal.rows[0].step
            steps = [step for step in steps if step.step < first]
            steps += _steps(journal)
    return tuple(steps)


def _steps(journal: Journal) -> Iterator[Step]:
    evaluations = _by_step(journal, "evaluation")
    checkpoints = _by_step(journal, "checkpoint")
    experts = _by_step(journal, "experts")
    for row in journal.rows:
        evaluation = evaluations.get(row.step)
        checkpoint = checkpoints.get(row.step)
        step = _step(row, evaluation, checkpoint)
        yield replace(step, expert_load=_loads(experts[row.step])) if row.step in experts else step


def _loads(event: JournalEvent) -> dict[str, tuple[int, ...]]:
    """Tokens of each expert, by the name of its router."""
    return {name: tuple(load) for name, load in event.fields.get("tokens", {}).items()}


def _step(
    row: JournalRow, evaluation: JournalEvent | None, checkpoint: JournalEvent | None
) -> Step:
    value = row.values
    nan = float("nan")
    return Step(
        step=row.step,
        loss=value.get("loss", nan),
        gradient_norm=value.get("gradient_norm", nan),
        learning_rate=value.get("learning_rate", nan),
        tokens=int(value.get("tokens", 0)),
        seconds=value.get("seconds", nan),
        memory_bytes=int(value.get("memory_bytes", 0)),
        read_bytes=int(value.get("read_bytes", 0)),
        written_bytes=int(value.get("written_bytes", 0)),
        flush_seconds=value.get("flush_seconds", 0.0),
        contention=value.get(_CONTENTION),
        device_memory_bytes=int(peak) if (peak := value.get(_DEVICE_MEMORY)) is not None else None,
        loss_scale=value.get(_LOSS_SCALE),
        dropped_share=value.get(_DROPPED_SHARE),
        by_kind=_named(value, _KIND_PREFIX),
        arrivals=_named(value, _ARRIVAL_PREFIX),
        cpu_seconds=value.get(_CPU_SECONDS),
        held_out_loss=evaluation.fields.get("loss") if evaluation else None,
        held_out_bits_per_byte=evaluation.fields.get("bits_per_byte") if evaluation else None,
        held_out_loss_ema=evaluation.fields.get("loss_ema") if evaluation else None,
        held_out_accuracy=evaluation.fields.get("accuracy") if evaluation else None,
        held_out_sentence_loss=evaluation.fields.get("sentence_loss") if evaluation else None,
        task_scores=_named(value, _TASK_PREFIX),
        saved=checkpoint.fields.get("name") if checkpoint else None,
    )


def _named(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The numbers whose names begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): number
        for name, number in values.items()
        if name.startswith(prefix)
    }


def _optional(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}


def _by_step(journal: Journal, name: str) -> dict[int, JournalEvent]:
    return {e.fields["step"]: e for e in journal.events if e.name == name and "step" in e.fields}
