"""The page of a run: one self-contained HTML file that compares prediction and measurement."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from windlass.judge import RunDiff
from windlass.report.figures.device_mesh import device_mesh_figure
from windlass.report.figures.svg import PALETTE_CSS, SVG_CSS
from windlass.report.formatting import (
    MFU_FORMULA,
    describe_graph,
    describe_plan,
    format_loss,
    format_ratio,
)
from windlass.report.html.assets import PAGE_CSS, PAGE_SCRIPT
from windlass.report.html.run_figures import (
    kind_table,
    loss_figure,
    memory_figure,
    optimizer_figure,
    rank_table,
    step_time_figure,
    term_figure,
    timeline_figure,
)
from windlass.report.predicted_vs_measured import headline_metrics, prediction_notes
from windlass.report.run_differences import input_line, key_rows, result_rows
from windlass.schema import Environment
from windlass.sparsity import describe_legs
from windlass.tracking import RunRecord
from windlass.units import format_bytes, format_count, format_seconds


def run_page(record: RunRecord) -> str:
    """The HTML page of a run; sections without data say what is missing."""
    sections = (
        _section("Loss", loss_figure(record)),
        _section("Gradient norm and learning rate", optimizer_figure(record)),
        *_sample_section(record),
        _section("Step time", step_time_figure(record)),
        _section("Where the time goes", kind_table(record) + term_figure(record)),
        *_rank_section(record),
        _section("Memory", memory_figure(record)),
        _section("One step, instruction by instruction", timeline_figure(record)),
        _section("Plan", _plan(record)),
        _section("Environment", _environment(record.environment)),
        _section("Files", _files(record)),
    )
    body = _header(record) + _tiles(record) + _faults(record) + "".join(sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(record.model)} – Windlass</title>"
        f"<style>{PALETTE_CSS}{SVG_CSS}{PAGE_CSS}</style></head>"
        f"<body><main>{body}</main><script>{PAGE_SCRIPT}</script></body></html>\n"
    )


def _header(record: RunRecord) -> str:
    machine = record.machine.name if record.machine else str(record.meta.get("machine", "?"))
    facts = [f"machine {machine}", f"run {record.id}"]
    if record.events:
        started = datetime.fromtimestamp(record.events[0].time, tz=UTC)
        facts.insert(0, started.strftime("%Y-%m-%d %H:%M UTC"))
    if record.parent is not None:
        facts.append(f"started from run {record.parent}")
    if record.attempts > 1:
        facts.append(f"attempt {record.attempts}")
    lines = [_capital(describe_plan(record.plan, record.graph))] if record.plan else []
    lines = [describe_graph(record.graph), *lines] if record.graph else lines
    if record.request is not None and record.request.train.steps is not None:
        legs = describe_legs(record.request.sparsity, record.request.train.steps)
        lines += [_capital(", ".join(legs))] if legs else []
    pill = f'<span class="pill {record.state}">{record.state}</span>'
    return (
        f'<header><div class="brand">Windlass run</div><h1>{escape(record.model)}{pill}</h1>'
        f'<p class="soft">{escape(" · ".join(facts))}</p>'
        + "".join(f"<p>{escape(line)}.</p>" for line in lines)
        + "</header>"
    )


def _tiles(record: RunRecord) -> str:
    pairs = headline_metrics(record.current_plan_steps, record.prediction)
    requested = record.request.train.steps if record.request else record.meta.get("steps")
    tiles = [
        (
            "steps",
            str(record.steps[-1].step) if record.steps else "none",
            f"of {requested} requested",
        ),
        *_loss_tiles(record),
        *_tokens_tile(record),
    ]
    outside: set[str] = set()
    formats = (
        ("seconds", format_seconds),
        ("tokens", format_count),
        ("mfu", lambda share: f"{100 * share:.1f} %"),
        ("memory", format_bytes),
        ("read", format_bytes),
        ("written", format_bytes),
    )
    for key, show in formats:
        pair = pairs.get(key)
        if pair is None or (pair.measured is None and pair.predicted is None):
            continue
        value = show(pair.measured) if pair.measured is not None else "not measured"
        more = [f"predicted {show(pair.predicted)}"] if pair.predicted is not None else []
        more += [format_ratio(pair.ratio)] if pair.ratio is not None else []
        tiles.append((pair.name, value, ", ".join(more)))
        outside |= {pair.name} if pair.outside_interval else set()
    markup = "".join(_tile(*tile, outside=tile[0] in outside) for tile in tiles)
    notes = prediction_notes(record.current_plan_steps, record.prediction)
    warning = f'<p class="warning">{escape(_capital("; ".join(notes)))}.</p>' if notes else ""
    return f'<div class="tiles">{markup}</div>{warning}'


def _loss_tiles(record: RunRecord) -> Iterable[tuple[str, str, str]]:
    if record.steps:
        last = record.steps[-1]
        first = format_loss(record.steps[0].loss)
        yield "loss", format_loss(last.loss), f"nats per token, from {first} at the first step"
    held_out = [step for step in record.steps if step.held_out_loss is not None]
    if held_out and held_out[-1].held_out_loss is not None:
        bits = held_out[-1].held_out_bits_per_byte
        more = f"at step {held_out[-1].step}"
        more += f", {bits:.3f} bits per byte" if bits is not None else ""
        accuracy = held_out[-1].held_out_accuracy
        more += f", {100 * accuracy:.1f} % right" if accuracy is not None else ""
        yield "held-out loss", format_loss(held_out[-1].held_out_loss), more
    scored = next((step for step in reversed(record.steps) if step.task_scores), None)
    for name, value in scored.task_scores.items() if scored is not None else ():
        yield name, f"{value:.3f}", f"at step {scored.step}" if scored is not None else ""


def _tokens_tile(record: RunRecord) -> Iterable[tuple[str, str, str]]:
    if record.steps:
        tokens = sum(step.tokens for step in record.steps)
        seconds = sum(step.seconds for step in record.steps)
        unit = (record.prediction.unit if record.prediction else None) or "tokens"
        yield f"{unit} seen", format_count(tokens), f"in {format_seconds(seconds)} of steps"


def _tile(name: str, value: str, more: str, *, outside: bool) -> str:
    """One number; a warning colour marks one outside its predicted interval."""
    hint = f' title="{escape(MFU_FORMULA)}"' if name == "MFU" else ""
    more = escape(more).replace(" ×", "&#160;×")
    kind = "tile outside" if outside else "tile"
    return (
        f'<div class="{kind}"{hint}><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}</div><div class="more">{more}</div></div>'
    )


def _faults(record: RunRecord) -> str:
    ends = [event.fields.get("reason") for event in record.events if event.name == "end"]
    alerts = [event.fields.get("message") for event in record.events if event.name == "alert"]
    messages = [str(text) for text in (*alerts, *ends[-1:], *record.faults) if text]
    if not messages:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in dict.fromkeys(messages))
    return f'<section class="faults"><h2>What went wrong</h2><ul>{rows}</ul></section>'


def _section(name: str, content: str) -> str:
    return f"<section><h2>{escape(name)}</h2>{content}</section>"


def _sample_section(record: RunRecord) -> Iterable[str]:
    """What the model wrote at the end of the run, with letters that cannot be shown replaced."""
    if record.sample:
        shown = "".join(
            letter if letter.isprintable() or letter in "\n\t" else "\ufffd"
            for letter in record.sample
        )
        note = "Text that the model wrote at the end of the run, without a prompt."
        yield _section(
            "Sample", f'<p class="note">{note}</p><pre class="sample">{escape(shown)}</pre>'
        )


def _rank_section(record: RunRecord) -> Iterable[str]:
    if table := rank_table(record):
        yield _section("Ranks", table)


def _plan(record: RunRecord) -> str:
    if record.plan is None:
        return '<p class="note">No plan in this run folder.</p>'
    text = f'<pre class="plan">{escape(record.plan.to_toml())}</pre>'
    if record.plan.parallel.devices > 1:
        text = f"<figure>{device_mesh_figure(record.plan)}</figure>{text}"
    if record.request is None:
        return text
    request = escape(record.request.to_toml())
    summary = "<details><summary>the request of this plan</summary>"
    return f'{text}<h2 class="next">Request</h2>{summary}<pre>{request}</pre></details>'


def _environment(environment: Environment | None) -> str:
    if environment is None:
        return '<p class="note">No environment in this run folder.</p>'
    commit = environment.commit or "outside a git checkout"
    facts = (
        ("command", " ".join(environment.command)),
        ("Windlass", f"{environment.windlass}, commit {commit}{_changed(environment)}"),
        ("host", environment.host),
        ("processor", f"{environment.processor}, {environment.threads} threads"),
        ("system", f"{environment.system}, Python {environment.python}"),
    )
    packages = "\n".join(f"{name}=={version}" for name, version in environment.packages.items())
    count = len(environment.packages)
    return (
        _facts(facts)
        + f"<details><summary>{count} packages</summary><pre>{escape(packages)}</pre></details>"
    )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _changed(environment: Environment) -> str:
    return " with uncommitted changes" if environment.dirty else ""


def _files(record: RunRecord) -> str:
    if not record.folder.is_dir():
        return f'<p class="note">{escape(str(record.folder))}</p>'
    files = sorted(
        file.relative_to(record.folder)
        for file in record.folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.parts[-2:])
    )
    rows = [(str(file), format_bytes((record.folder / file).stat().st_size)) for file in files]
    return f'<p class="note">In {escape(str(record.folder))}</p>' + _facts(rows)


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    cells = (
        f'<tr><td class="soft">{escape(name)}</td><td class="wide">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table>{''.join(cells)}</table>"


_LINE_COLOURS = {"+": "var(--green)", "-": "var(--red)", "@": "var(--blue)"}


def run_diff_page(found: RunDiff) -> str:
    """The HTML page; it has no script."""
    names = [run.short_id for run in found.runs]
    title = f"{names[-1]} beside {names[0]}" if len(names) == 2 else " beside ".join(names)
    runs = "".join(
        f"<p>{escape(run.short_id)}: {escape(run.name)}, {escape(run.model)} on "
        f"{escape(run.machine)}, {escape(run.state)}</p>"
        for run in found.runs
    )
    body = (
        f'<header><div class="brand">Windlass diff</div><h1>{escape(title)}</h1>'
        f"<p>{escape(input_line(found))}.</p>{runs}</header>"
        + _section("Inputs", _table(("input", "key", *names), key_rows(found)))
        + _section("Results", _table(("result", *names, "difference"), result_rows(found)))
        + (_section("Code", _code(found.code)) if found.code else "")
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} – Windlass</title>"
        f"<style>{PALETTE_CSS}{PAGE_CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    lines = [
        "<tr>" + "".join(f'<td class="wide">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    ]
    if not lines:
        return '<p class="note">Nothing differs.</p>'
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _code(lines: Sequence[str]) -> str:
    shown = "\n".join(
        f'<span style="color:{_LINE_COLOURS.get(line[:1], "inherit")}">{escape(line)}</span>'
        for line in lines
    )
    return f"<pre>{shown}</pre>"
