"""The figures of a run's page, each from a record alone: a drawing, its table, and one note."""

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
from windlass.report.figures.svg import bytes_unit, kind_colour, seconds_unit
from windlass.report.figures.timeline import predicted_and_measured_timeline
from windlass.report.formatting import describe_coord, format_ratio
from windlass.report.predicted_vs_measured import (
    device_memory_peak,
    measured_memory_peak,
    median_step_seconds,
    rank_step_times,
    seconds_by_kind,
)
from windlass.schema.prediction import DeviceTimeline, Prediction, TierPeak, Timeline
from windlass.schema.run_record import Step
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
    rules, note = [], "Cross-entropy in nats a token."
    entropy = record.meta.get("unigram_entropy")
    if isinstance(entropy, float | int):
        rules.append(
            ReferenceLine(
                name=f"unigram entropy {entropy:.2f}", y=float(entropy), colour="var(--grey)"
            )
        )
        note += " The dashed line is what knowing only how often each token occurs would give."
    bad = [step.step for step in record.steps if not math.isfinite(step.loss)]
    if bad:
        note += f" The loss is no number at step {bad[0]}."
    axes = ChartAxes(x_name="step", y_name="loss")
    return _chart(line_chart("loss over steps", series, axes, rules), note)


def step_time_figure(record: RunRecord) -> str:
    """Measured time of each step, with the predicted time and its interval."""
    prediction, steps = record.prediction, record.steps
    if not steps and prediction is None:
        return _missing("No step was taken, and no prediction is in this run folder.")
    typical = median_step_seconds(steps) or (prediction.step_seconds if prediction else 0.0)
    most = max(_high(steps), prediction.high_seconds if prediction else 0.0)
    rules = []
    note = "Without evaluation and saving."
    if prediction is not None:
        rules.append(
            ReferenceLine(
                name=_interval(prediction), y=prediction.step_seconds,
                low=prediction.low_seconds, high=prediction.high_seconds, colour="var(--orange)",
            )
        )  # fmt: skip
    seconds = [step.seconds for step in steps]
    above = [step for step in steps if step.seconds > most]
    if above:
        slowest = max(above, key=lambda step: step.seconds)
        note += (
            f" {_steps(len(above))} above the picture; the slowest is step {slowest.step} with "
            f"{format_seconds(slowest.seconds)}"
        ) + (", which also compiles." if slowest.step == steps[0].step else ".")
    series = ChartSeries(
        name="measured", xs=[float(step.step) for step in steps], ys=seconds, colour="var(--blue)"
    )
    axes = ChartAxes(
        x_name="step", y_name="step time", y_unit=seconds_unit(typical), y_from_zero=True,
        y_max=most,
    )  # fmt: skip
    return _chart(line_chart("step time over steps", [series], axes, rules), note)


def kind_table(record: RunRecord) -> str:
    """Seconds by instruction kind, measured over predicted, as bars and numbers."""
    pairs = seconds_by_kind(record.current_plan_steps, record.prediction)
    if not pairs:
        return _missing("Neither measured nor predicted by instruction kind.")
    most = max(max(pair.predicted or 0.0, pair.measured or 0.0) for pair in pairs) or 1.0
    rows = []
    for pair in pairs:
        colour = kind_colour(pair.name)
        bars = _bar("predicted", pair.predicted, most, colour)
        bars += _bar("measured", pair.measured, most, colour)
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
    note = "Seconds of a step; measured is the median over steps without the first."
    return f'<p class="note">{note}</p><table>{head}{"".join(rows)}</table>'


def device_table(record: RunRecord) -> str:
    """How each device of several spends a step, and what it holds; nothing of one device."""
    if record.plan is None or not record.steps_by_rank:
        return ""
    cut = record.plan.parallel
    found = rank_step_times(record.steps_by_rank, cut)
    most = max((each.busy_seconds + each.waiting_seconds for each in found), default=0.0) or 1.0
    rows = [
        f"<tr><td>{each.rank}</td><td>{escape(describe_coord(each.coord, cut))}</td>"
        '<td class="bars"><span class="beside">'
        + _bar("busy", each.busy_seconds, most, "var(--blue)")
        + _bar("waiting", each.waiting_seconds, most, "var(--line)")
        + "</span></td>"
        + _number(format_seconds(each.busy_seconds))
        + _number(format_seconds(each.waiting_seconds))
        + _number("–" if each.memory_bytes is None else format_bytes(each.memory_bytes))
        + "</tr>"
        for each in found
    ]
    head = (
        '<tr><th>device</th><th>place</th><th>a step: busy, then waiting</th><th class="number">'
        'busy</th><th class="number">waiting</th><th class="number">peak memory</th></tr>'
    )
    note = "Medians of the last attempt. Waiting is for messages, and in meetings with others."
    return f'<p class="note">{note}</p><table>{head}{"".join(rows)}</table>'


def term_figure(record: RunRecord) -> str:
    """The predicted step time by term, as one stacked bar."""
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
    """Predicted memory over the step, the measured peak, and what fills the peak."""
    peak, measured = (
        device_memory_peak(record.prediction),
        measured_memory_peak(record.current_plan_steps),
    )
    series = []
    for name, line, colour in (
        ("predicted over the step", record.predicted_timeline, "var(--orange)"),
        ("measured over the step", record.measured_timeline, "var(--blue)"),
    ):
        lane = _lane_with_memory(line)
        if lane is not None:
            xs, ys = zip(*memory_over_time(lane), strict=True)
            series.append(ChartSeries(name=name, xs=xs, ys=ys, colour=colour, style="area"))
    if peak is None and measured is None and not series:
        return _missing("Memory is neither predicted nor measured.")
    rules = (
        [
            ReferenceLine(
                name=f"measured peak {format_bytes(measured)}", y=measured, colour="var(--blue)"
            )
        ]
        if measured
        else []
    )
    drawn = ""
    if series:
        longest = max(one.xs[-1] for one in series)
        highest = max(*(max(one.ys) for one in series), *(rule.y for rule in rules), 1.0)
        axes = ChartAxes(
            x_name="time in the step", y_name="memory", x_unit=seconds_unit(longest),
            y_unit=bytes_unit(highest), y_from_zero=True,
        )  # fmt: skip
        note = "The measured peak is that of the whole process up to the last step."
        drawn += _chart(line_chart("memory over the step", series, axes, rules), note)
    return drawn + (_peak(peak, measured) if peak else "")


def timeline_figure(record: RunRecord) -> str:
    """Lanes of one step, predicted above measured on the same clock."""
    if record.predicted_timeline is None and record.measured_timeline is None:
        return _missing("No timeline in this run folder.")
    note = (
        "Predicted above measured on one clock. Rest the pointer on a piece to read it; "
        "turn the wheel to zoom, drag to move, double-click to see all."
    )
    if record.measured_timeline is None:
        note = f"No step was measured instruction by instruction yet. {note}"
    drawn = predicted_and_measured_timeline(record.predicted_timeline, record.measured_timeline)
    return f'<p class="note">{note}</p><figure>{drawn}</figure>'


def _peak(peak: TierPeak, measured: int | None) -> str:
    more = f", measured {format_bytes(measured)}" if measured else ""
    name = f"Predicted peak in {peak.tier}: {format_bytes(peak.peak_bytes)}{more}"
    note = f"Of {format_bytes(peak.capacity_bytes)} that the tier holds."
    shares: dict[str, float] = {
        str(name): float(count) for name, count in peak.by_class.items() if count
    }
    return (
        f'<h2 class="next">{escape(name)}</h2><p class="note">{note}</p>'
        + _stack(shares, {str(name): colour for name, colour in CLASS_COLOURS.items()}, format_bytes)
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


def _lane_with_memory(line: Timeline | None) -> DeviceTimeline | None:
    lanes = line.devices if line else ()
    return next((lane for lane in lanes if lane.memory_bytes), None)


def _high(steps: Sequence[Step]) -> float:
    """Where the picture of step times ends: above all but rare slow steps."""
    seconds = sorted(step.seconds for step in steps if math.isfinite(step.seconds))
    if not seconds:
        return 0.0
    middle = seconds[len(seconds) // 2]
    return min(seconds[-1], max(seconds[int(0.98 * (len(seconds) - 1))], 1.5 * middle))


def _interval(prediction: Prediction) -> str:
    low, high = format_seconds(prediction.low_seconds), format_seconds(prediction.high_seconds)
    return f"predicted {format_seconds(prediction.step_seconds)}, 80 % interval {low} to {high}"


def _bar(name: str, seconds: float | None, most: float, colour: str) -> str:
    if seconds is None:
        return ""
    style = f"width:{100 * seconds / most:.2f}%;background:{colour}"
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
