"""The figures and tables of a run's page, each with one note, drawn from a run record alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from windlass.report.figures.line_chart import (
    ChartAxes,
    ChartSeries,
    ReferenceLine,
    line_chart,
    running_mean,
)
from windlass.report.figures.memory import CLASS_COLOURS, memory_over_time
from windlass.report.figures.svg import bytes_unit, kind_colour, power_unit, seconds_unit
from windlass.report.figures.timeline import predicted_and_measured_timeline
from windlass.report.formatting import describe_coord, format_ratio
from windlass.report.predicted_vs_measured import (
    device_memory_peak,
    measured_memory_peak,
    median_step_seconds,
    rank_step_times,
    seconds_by_kind,
)
from windlass.schema import DeviceTimeline, Prediction, Step, TierPeak, Timeline
from windlass.tracking import RunRecord
from windlass.units import format_bytes, format_seconds

_MEAN_STEPS = 21
_TERM_COLOURS = ("blue", "orange", "green", "pink", "violet", "red", "brown", "grey")


def loss_figure(record: RunRecord) -> str:
    """Training loss of each step and its running mean, held-out loss, and the unigram entropy."""
    if not record.steps:
        return _missing("No step was taken.")
    xs = [float(step.step) for step in record.steps]
    losses = [step.loss for step in record.steps]
    held_out = [(float(s.step), s.held_out_loss) for s in record.steps if s.held_out_loss]
    series = [ChartSeries(name="training", xs=xs, ys=losses, colour="var(--sky)", style="faint")]
    if len(xs) > _MEAN_STEPS:
        mean = running_mean(losses, _MEAN_STEPS)
        name = f"mean of {_MEAN_STEPS} steps"
        series.append(ChartSeries(name=name, xs=xs, ys=mean, colour="var(--blue)"))
    else:
        series = [ChartSeries(name="training", xs=xs, ys=losses, colour="var(--blue)")]
    if held_out:
        series.append(
            ChartSeries(
                name="held out", xs=[x for x, _ in held_out], ys=[y for _, y in held_out],
                colour="var(--red)", style="dots",
            )
        )  # fmt: skip
    lines, note = [], "Cross-entropy in nats per token."
    entropy = record.meta.get("unigram_entropy")
    if isinstance(entropy, float | int):
        lines.append(
            ReferenceLine(
                name=f"unigram entropy {entropy:.2f}", y=float(entropy), colour="var(--grey)"
            )
        )
        note += " The dashed line is the loss of a model that knows only token frequencies."
    not_finite = [step.step for step in record.steps if not math.isfinite(step.loss)]
    if not_finite:
        note += f" The loss is not finite at step {not_finite[0]}."
    axes = ChartAxes(x_name="step", y_name="loss")
    return _chart(line_chart("loss over steps", series, axes, lines), note)


def optimizer_figure(record: RunRecord) -> str:
    """Global gradient norm and learning rate of each step."""
    if not record.steps:
        return _missing("No step was taken.")
    xs = [float(step.step) for step in record.steps]
    clip = record.request.train.clip if record.request else None
    lines = []
    if clip is not None:
        lines = [ReferenceLine(name=f"clipped to {clip:g}", y=clip, colour="var(--grey)")]
    norms = [step.gradient_norm for step in record.steps]
    norm = ChartSeries(name="gradient norm", xs=xs, ys=norms, colour="var(--violet)")
    rates = [step.learning_rate for step in record.steps]
    rate = ChartSeries(name="learning rate", xs=xs, ys=rates, colour="var(--green)")
    note = "Norm of the gradients of all weights together, before they are clipped."
    axes = ChartAxes(x_name="step", y_name="gradient norm", y_from_zero=True)
    return _chart(line_chart("gradient norm over steps", [norm], axes, lines), note) + _chart(
        line_chart(
            "learning rate over steps",
            [rate],
            ChartAxes(
                x_name="step",
                y_name="learning rate",
                y_from_zero=True,
                y_unit=power_unit(max(rates)),
            ),
        ),
        "",
    )


def step_time_figure(record: RunRecord) -> str:
    """Measured time of each step, with the predicted time and its interval."""
    prediction, steps = record.prediction, record.steps
    if not steps and prediction is None:
        return _missing("No step was taken, and no prediction is in this run folder.")
    typical = median_step_seconds(steps) or (prediction.step_seconds if prediction else 0.0)
    top = max(_upper_end(steps), prediction.high_seconds if prediction else 0.0)
    lines = []
    note = "Without evaluation and saving."
    if prediction is not None:
        lines.append(
            ReferenceLine(
                name=_interval(prediction), y=prediction.step_seconds,
                low=prediction.low_seconds, high=prediction.high_seconds, colour="var(--orange)",
            )
        )  # fmt: skip
    seconds = [step.seconds for step in steps]
    above = [step for step in steps if step.seconds > top]
    compiles = record.plan is None or record.plan.compile
    if above:
        slowest = max(above, key=lambda step: step.seconds)
        note += (
            f" {_steps(len(above))} above the chart; the slowest is step {slowest.step} with "
            f"{format_seconds(slowest.seconds)}"
        ) + (", which also compiles." if slowest.step == steps[0].step and compiles else ".")
    series = ChartSeries(
        name="measured", xs=[float(step.step) for step in steps], ys=seconds, colour="var(--blue)"
    )
    axes = ChartAxes(
        x_name="step", y_name="step time", y_unit=seconds_unit(typical), y_from_zero=True,
        y_max=top,
    )  # fmt: skip
    return _chart(line_chart("step time over steps", [series], axes, lines), note)


def kind_table(record: RunRecord) -> str:
    """HTML table of predicted and measured seconds by instruction kind, with bars."""
    pairs = seconds_by_kind(record.current_plan_steps, record.prediction)
    if not pairs:
        return _missing("Neither a measurement nor a prediction by instruction kind.")
    longest = max(max(pair.predicted or 0.0, pair.measured or 0.0) for pair in pairs) or 1.0
    rows = []
    for pair in pairs:
        colour = kind_colour(pair.name)
        bars = _bar("predicted", pair.predicted, longest, colour)
        bars += _bar("measured", pair.measured, longest, colour)
        rows.append(
            f'<tr><td>{escape(pair.name)}</td><td class="bars">{bars}</td>'
            + _number(_seconds(pair.predicted))
            + _number(_seconds(pair.measured))
            + _number(format_ratio(pair.ratio))
            + "</tr>"
        )
    head = (
        '<tr><th>instruction kind</th><th>predicted (pale) above measured</th><th class="number">'
        'predicted</th><th class="number">measured</th><th class="number">ratio</th></tr>'
    )
    note = "Seconds per step; measured is the median over all steps but the first."
    return f'<p class="note">{note}</p><table>{head}{"".join(rows)}</table>'


def rank_table(record: RunRecord) -> str:
    """HTML table of busy and waiting time and peak memory by rank; empty on a single device."""
    if record.plan is None or not record.steps_by_rank:
        return ""
    parallel = record.plan.parallel
    times = rank_step_times(record.steps_by_rank, parallel)
    longest = max((time.busy_seconds + time.waiting_seconds for time in times), default=0.0) or 1.0
    rows = [
        f"<tr><td>{time.rank}</td><td>{escape(describe_coord(time.coord, parallel))}</td>"
        '<td class="bars"><span class="beside">'
        + _bar("busy", time.busy_seconds, longest, "var(--blue)")
        + _bar("waiting", time.waiting_seconds, longest, "var(--line)")
        + "</span></td>"
        + _number(format_seconds(time.busy_seconds))
        + _number(format_seconds(time.waiting_seconds))
        + _number("–" if time.memory_bytes is None else format_bytes(time.memory_bytes))
        + "</tr>"
        for time in times
    ]
    head = (
        '<tr><th>rank</th><th>position</th><th>one step: busy, then waiting</th><th class="number">'
        'busy</th><th class="number">waiting</th><th class="number">peak memory</th></tr>'
    )
    note = "Medians of the last attempt. Waiting is time in receives and collectives."
    return f'<p class="note">{note}</p><table>{head}{"".join(rows)}</table>'


def term_figure(record: RunRecord) -> str:
    """Stacked bar of the predicted step time by term."""
    if record.prediction is None or not record.prediction.by_term:
        return ""
    terms = sorted(record.prediction.by_term.items(), key=lambda item: -item[1])
    colours = {
        name: _TERM_COLOURS[min(index, len(_TERM_COLOURS) - 1)]
        for index, (name, _) in enumerate(terms)
    }
    name = '<h2 class="next">Predicted step time by term</h2>'
    return name + _stack(dict(terms), colours, format_seconds)


def memory_figure(record: RunRecord) -> str:
    """Memory over the step, the measured peak, and the predicted peak by memory class."""
    peak = device_memory_peak(record.prediction)
    measured = measured_memory_peak(record.current_plan_steps)
    series = []
    for name, timeline, colour in (
        ("predicted over the step", record.predicted_timeline, "var(--orange)"),
        ("measured over the step", record.measured_timeline, "var(--blue)"),
    ):
        lane = _lane_with_memory(timeline)
        if lane is not None:
            xs, ys = zip(*memory_over_time(lane), strict=True)
            series.append(ChartSeries(name=name, xs=xs, ys=ys, colour=colour, style="area"))
    if peak is None and measured is None and not series:
        return _missing("Neither a prediction nor a measurement of memory.")
    lines = []
    if measured:
        name = f"measured peak {format_bytes(measured)}"
        lines.append(ReferenceLine(name=name, y=measured, colour="var(--blue)"))
    chart = ""
    if series:
        end = max(shown.xs[-1] for shown in series)
        highest = max(*(max(shown.ys) for shown in series), *(line.y for line in lines), 1.0)
        axes = ChartAxes(
            x_name="time in the step", y_name="memory", x_unit=seconds_unit(end),
            y_unit=bytes_unit(highest), y_from_zero=True,
        )  # fmt: skip
        note = "The measured peak is that of the whole process up to the last step."
        chart = _chart(line_chart("memory over the step", series, axes, lines), note)
    return chart + (_peak(peak, measured) if peak else "")


def timeline_figure(record: RunRecord) -> str:
    """Lanes of one step, predicted above measured on one time axis."""
    if record.predicted_timeline is None and record.measured_timeline is None:
        return _missing("No timeline in this run folder.")
    note = (
        "Predicted above measured on one time axis. Rest the pointer on a bar to read it; "
        "turn the wheel to zoom, drag to move, double-click to see all."
    )
    if record.measured_timeline is None:
        note = f"No step was measured instruction by instruction yet. {note}"
    svg = predicted_and_measured_timeline(record.predicted_timeline, record.measured_timeline)
    return f'<p class="note">{note}</p><figure>{svg}</figure>'


def _peak(peak: TierPeak, measured: int | None) -> str:
    more = f", measured {format_bytes(measured)}" if measured else ""
    name = f"Predicted peak in {peak.tier}: {format_bytes(peak.peak_bytes)}{more}"
    note = f"The capacity is {format_bytes(peak.capacity_bytes)}."
    sizes: dict[str, float] = {
        str(name): float(count) for name, count in peak.by_class.items() if count
    }
    return (
        f'<h2 class="next">{escape(name)}</h2><p class="note">{note}</p>'
        + _stack(sizes, {str(name): colour for name, colour in CLASS_COLOURS.items()}, format_bytes)
    )  # fmt: skip


def _stack(
    parts: Mapping[str, float], colours: Mapping[str, str], show: Callable[[float], str]
) -> str:
    total = sum(parts.values()) or 1.0
    bars = "".join(
        f'<span style="flex:{max(size / total, 1e-6):.6f};background:var(--{colours[name]})" '
        f'title="{escape(name)}: {show(size)}"></span>'
        for name, size in parts.items()
    )
    keys = "".join(
        f'<span><i style="background:var(--{colours[name]})"></i>{escape(name)} {show(size)} '
        f"({100 * size / total:.0f} %)</span>"
        for name, size in parts.items()
    )
    return f'<div class="stack">{bars}</div><div class="keys">{keys}</div>'


def _lane_with_memory(timeline: Timeline | None) -> DeviceTimeline | None:
    lanes = timeline.devices if timeline else ()
    return next((lane for lane in lanes if lane.memory_bytes), None)


def _upper_end(steps: Sequence[Step]) -> float:
    """Upper end of the step time chart: above all but rare slow steps."""
    seconds = sorted(step.seconds for step in steps if math.isfinite(step.seconds))
    if not seconds:
        return 0.0
    middle = seconds[len(seconds) // 2]
    return min(seconds[-1], max(seconds[int(0.98 * (len(seconds) - 1))], 1.5 * middle))


def _interval(prediction: Prediction) -> str:
    low, high = format_seconds(prediction.low_seconds), format_seconds(prediction.high_seconds)
    return f"predicted {format_seconds(prediction.step_seconds)}, 80 % interval {low} to {high}"


def _bar(name: str, seconds: float | None, longest: float, colour: str) -> str:
    if seconds is None:
        return ""
    style = f"width:{100 * seconds / longest:.2f}%;background:{colour}"
    text = f"{name} {format_seconds(seconds)}"
    return f'<span class="bar {name}" style="{style}" title="{text}"></span>'


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)


def _number(text: str) -> str:
    return f'<td class="number">{text}</td>'


def _steps(count: int) -> str:
    return f"{count} step{'s lie' if count > 1 else ' lies'}"


def _chart(svg: str, note: str) -> str:
    return f'<p class="note">{escape(note)}</p><figure class="chart">{svg}</figure>'


def _missing(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
