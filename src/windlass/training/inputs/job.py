"""What a plan trains on, for how long and at what cost; and the data that a large job must name."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.errors import raise_data_errors
from windlass.jobs import Planned, estimate_data, has_own_text
from windlass.schema import DataSize
from windlass.training.inputs.data_fit import describe_misfit
from windlass.units import format_count, format_seconds

_LARGE_DEVICE_HOURS = 1.0
"""Predicted time of all devices from which on a run must name its data."""
_MOST_PASSES = 4.0
"""Passes over the same text up to which more of it is nearly as good as new text. Source:
Muennighoff et al. 2023, arXiv:2305.16264."""
_LEAST_SHARE = 0.5
"""Share of a model's entries that a tokenizer has at least, or most of them learn nothing."""
_NO_PASS = 0.01
"""Passes below which a share is none worth a number."""

_NO_HOURS = 0.01
"""Device-hours below which no number is worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """How much a run trains, and what that takes."""

    steps: int
    samples: int
    """Sequences or other examples that all steps take."""
    tokens: int
    """Positions of all of them."""
    passes: float | None
    """How often the run passes over its data; None if their size is not known."""
    seconds: float
    """Predicted time of all steps and of the first compilation."""
    devices: int

    @property
    def device_hours(self) -> float:
        """Predicted time of all devices together, in hours."""
        return self.devices * self.seconds / 3600


def job_size(planned: Planned) -> JobSize:
    """The size of a planned run, from its beginning to its last step.

    Raises:
        PlanError: nothing fits.
    """
    train, prediction = planned.request.train, planned.prediction
    samples = train.steps * train.batch
    data, passes = _data_size(planned), None
    if data is not None and data.rows is not None:
        passes = samples / max(1, data.rows)
    elif data is not None and data.tokens is not None:
        passes = samples * train.sequence / max(1, data.tokens)
    return JobSize(
        steps=train.steps,
        samples=samples,
        tokens=samples * train.sequence,
        passes=passes,
        seconds=train.steps * prediction.step_seconds + prediction.compile_seconds,
        devices=planned.plan.parallel.devices,
    )


def describe_job(planned: Planned) -> tuple[tuple[str, str], ...]:
    """What a run trains on, and how long it takes, each as a heading with its words."""
    misfit = describe_misfit(planned)
    tokenizer = () if misfit is None else (("tokenizer", misfit),)
    return ("data", _data_words(planned)), *tokenizer, ("run", _run_words(planned))


def require_named_data(planned: Planned) -> None:
    """Refuses a large job on the text that every machine has, or by a tokenizer far too small.

    Raises:
        DataError: the job is large, and nobody has named its text or its tokenizer.
        InputErrors: nobody has named either.
    """
    raise_data_errors(list(unnamed_data(planned).values()))


def unnamed_data(planned: Planned) -> dict[str, str]:
    """Keys that a large job leaves open, and why `train` and `launch` refuse that."""
    return dict(_unnamed_data(planned))


def _unnamed_data(planned: Planned) -> Iterator[tuple[str, str]]:
    graph, data = planned.graph, planned.request.data
    if planned.objects.examples is not None or graph.examples is not None:
        return
    job, named = job_size(planned), data.model_fields_set
    if job.device_hours < _LARGE_DEVICE_HOURS:
        return
    cost = f"predicted: {_device_hours(planned, job)}"
    if has_own_text(data) and (job.passes or 0) > _MOST_PASSES:
        words = (
            f"the run would pass {job.passes:,.0f} times over Python's standard library, which is "
            f"trained on where no text is named ({cost}); name yours as `data.source`, or set "
            "`data.source=stdlib` to train on it all the same"
        )
        yield "data.source", words
    is_trained = data.tokenizer == "bpe" and not {"tokenizer", "vocabulary"} & named
    if is_trained and data.vocabulary < _LEAST_SHARE * graph.vocabulary:
        words = (
            f"a tokenizer of {data.vocabulary:,} entries would be trained for `{graph.name}`, "
            f"which has {graph.vocabulary:,} ({cost}); name its `tokenizer.json` as "
            f"`data.tokenizer`, or set `data.vocabulary={data.vocabulary}` to train it all the same"
        )
        yield "data.tokenizer", words


def _data_size(planned: Planned) -> DataSize | None:
    """The size of the data: counted if they were read, otherwise estimated if they are here."""
    examples, data = planned.objects.examples, planned.request.data
    if examples is not None:
        return DataSize(rows=len(examples.inputs) - examples.held_out)
    size = planned.data or estimate_data(data)
    return size if size is None else replace(size, is_named=not has_own_text(data))


def _data_words(planned: Planned) -> str:
    data, size = planned.request.data, _data_size(planned)
    names = ", ".join(f"`{name}`" for name in data.sources)
    if planned.objects.examples is not None:
        names = "what was passed"
    elif has_own_text(data):
        names = "Python's standard library, as no `data.source` is named"
    if size is None:
        return f"{names}, not read for this plan"
    about = "about " if size.is_estimate else ""
    noun = {"chat": "conversations", "images": "images", "classes": "texts"}.get(data.format, "")
    counts = [] if size.rows is None else [f"{size.rows:,} {noun or 'examples'}"]
    if size.tokens is not None:
        counts.append(f"{about}{format_count(size.tokens)} tokens")
    words = f"{names}: {', '.join(counts)} to train on"
    if size.tokens is not None and data.tokenizer == "bpe":
        words += f", by a tokenizer of {data.vocabulary:,} entries"
    is_refused = planned.result.plan is not None and any(unnamed_data(planned))
    return words + ("; `train` and `launch` refuse a run of this size on it" * is_refused)


def _run_words(planned: Planned) -> str:
    job, examples = job_size(planned), planned.graph.examples
    noun = "conversations" if planned.request.data.format == "chat" else None
    noun = noun if examples is None else examples.noun
    count = f"{job.samples:,} {noun}" if noun else f"{format_count(job.tokens)} tokens"
    passes = ""
    if job.passes is not None and job.passes >= _NO_PASS:
        shown = f"{job.passes:,.0f}" if job.passes >= 10 else f"{job.passes:.2g}"
        passes = f", {shown} time{'s' * (shown != '1')} the data"
    return (
        f"{job.steps:,} step{'s' * (job.steps > 1)}, {count}{passes}; predicted "
        f"{format_seconds(job.seconds)}, {_device_hours(planned, job)}"
    )


def _device_hours(planned: Planned, job: JobSize) -> str:
    """`4,960 GPU-hours`."""
    name = "GPU-hours" if planned.machine.device.kind == "cuda" else "device-hours"
    hours = job.device_hours
    if hours < _NO_HOURS:
        return f"below {_NO_HOURS} {name}"
    return f"{hours:,.0f} {name}" if hours >= 10 else f"{hours:.2g} {name}"
