"""Judges runs, also while they train, and tells somebody."""

import contextlib
import json
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from windlass.errors import RequestError, WindlassError
from windlass.judge import Verdict, judge as judge_evidence
from windlass.judging.gather import document_counts, gather_evidence
from windlass.judging.history import History, read_history
from windlass.record import RUNS
from windlass.schema import CHECKPOINT_FOLDER, RunState, Step
from windlass.tracking import RunRecord, find_run, load_run
from windlass.training import Run, never_stop, planned_from_record

_FIRST_STEPS, _SHARE = 50, 0.02
"""A run is judged every 50 steps, or every 2 % of its steps if that is more."""
_ALERT_SECONDS = 30.0
_WEB = ("http://", "https://")


def judge(run: str | Path, *, root: Path | str = RUNS) -> Verdict:
    """The verdict on a run: `expected`, `slow`, `broken` or `unknown`, and why.

    It is compared with its prediction, with the runs of the same graph, plan and machine under
    `root` that nobody marked as broken, and with its own past.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or more than one.
    """
    folder = find_run(Path(root), str(run))
    record = load_run(folder)
    return _judge_record(record, read_history(folder, Path(root)))


def follow_verdict(
    run: str | Path,
    *,
    root: Path | str = RUNS,
    poll_seconds: float = 5.0,
    stop: Callable[[], bool] = never_stop,
) -> Iterator[Verdict]:
    """The verdicts on a run while it trains: the first one, and each that says something else.

    It ends with the run; the last verdict is on all of it.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        root: the folder that holds the run folders.
        poll_seconds: time between two looks at its journal.
        stop: asked before each look; True ends.

    Raises:
        RecordError: no such run, or more than one.
    """
    folder = find_run(Path(root), str(run))
    history, verdict, due = read_history(folder, Path(root)), None, 0
    while not stop():
        record = load_run(folder)
        running = record.state in ("running", "prepared")
        last = record.steps[-1].step if record.steps else 0
        if last >= due or not running:
            due = last + _interval(last)
            latest = _judge_record(record, history)
            if not latest.same_as(verdict):
                yield latest
            verdict = latest
        if not running:
            return
        time.sleep(poll_seconds)


class LiveJudge:
    """Judges a run of this process while it trains, and puts changed verdicts on its record.

    Args:
        run: a run that was not iterated over yet.
        root: the folder that holds the runs to compare it with.
    """

    def __init__(self, run: Run, root: Path | str) -> None:
        self._run = run
        self._history = History()
        self._verdict: Verdict | None = None
        self._due = _FIRST_STEPS
        try:
            self._history = read_history(run.folder, Path(root))
        except WindlassError:
            # A record that cannot be read ends no training; there are no peers then.
            self._history = History()

    def observe(self, step: Step) -> Verdict | None:
        """The verdict after a step, if it says something else than the one before it.

        Args:
            step: the step that was put on record last.
        """
        is_last = step.step >= self._run.planned.request.train.steps
        if step.step < self._due and not is_last:
            return None
        self._due = step.step + _interval(step.step)
        try:
            latest = _judge_folder(self._run.folder, self._history)
            changed = not latest.same_as(self._verdict)
            if changed or is_last:
                self._run.record_verdict(latest.model_dump(mode="json"))
        except WindlassError:
            return None
        self._verdict = latest
        return latest if changed else None


def send_alert(target: str, verdict: Verdict, folder: Path) -> None:
    """Tells a command or a web page of a verdict, as JSON with `run`, `folder` and `headline`.

    Args:
        target: a command, whose words are split as a shell would and which no shell sees, and that
            gets the JSON on its standard input; or an address that begins with `http`, which gets
            it by POST.
        verdict: the verdict.
        folder: the run folder.

    Raises:
        RequestError: the command is missing, fails or takes longer than 30 s, or nobody answers.
    """
    content = {"run": folder.name, "folder": str(folder), "headline": verdict.headline}
    body = json.dumps(content | {"verdict": verdict.model_dump(mode="json")}).encode()
    if target.startswith(_WEB):
        _post(target, body)
        return
    words = _alert_words(target)
    try:
        subprocess.run(words, input=body, timeout=_ALERT_SECONDS, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise RequestError(
            f"the alert command `{words[0]}` failed ({error}); the verdict is `{verdict.headline}`"
        ) from None


def require_alert(target: str) -> None:
    """Refuses a target of alerts that is no command and no address.

    Raises:
        RequestError: it has no words, or a quotation mark that nothing closes.
    """
    if not target.startswith(_WEB):
        _alert_words(target)


def _alert_words(target: str) -> list[str]:
    """The words of an alert command."""
    try:
        words = shlex.split(target)
    except ValueError as error:
        raise RequestError(f"the alert command `{target}` is no command: {error}") from None
    if not words:
        raise RequestError("`--alert` names no command; give one, or an address with http://")
    return words


def _post(address: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data=body, headers=headers)  # noqa: S310  http only
    try:
        with urllib.request.urlopen(request, timeout=_ALERT_SECONDS) as answer:  # noqa: S310
            answer.read(1)
    except (OSError, ValueError, urllib.error.URLError) as error:
        where = address.partition("?")[0]
        raise RequestError(f"the alert to `{where}` was not taken: {error}") from None


def _judge_record(record: RunRecord, history: History) -> Verdict:
    reason = str(record.events[-1].fields.get("reason", "")) if record.events else ""
    return _judge_folder(record.folder, history, record.state, reason)


def _judge_folder(
    folder: Path, history: History, state: RunState = "running", reason: str = ""
) -> Verdict:
    evidence = gather_evidence(folder, history, state=state, reason=reason)
    verdict = judge_evidence(evidence)
    if verdict.quantity in ("loss", "gradient norm") and verdict.since_step is not None:
        # Only now is it worth looking up what the steps were trained on.
        known = judge_evidence(replace(evidence, documents=document_counts(folder)))
        return with_skip_advice(known, folder)
    return verdict


def _interval(step: int) -> int:
    return max(_FIRST_STEPS, round(_SHARE * step))


def with_skip_advice(verdict: Verdict, folder: Path) -> Verdict:
    """A verdict that also names the batches of a loss spike, and the command that leaves them out.

    Args:
        folder: the run's; one that no loop of Windlass has trained gets no advice.
    """
    if verdict.spike is None:
        return verdict
    with contextlib.suppress(WindlassError):
        sentence = _advice(verdict.spike, folder)
        return verdict.model_copy(update={"sentences": (*verdict.sentences, sentence)})
    return verdict


def _advice(spike: tuple[int, int], folder: Path) -> str:
    """The batches that the steps of a spike took, and what leaves them out."""
    from windlass.data import batch_of_step
    from windlass.runtime import checkpoint_folders

    record = load_run(folder)
    request = planned_from_record(record).request
    first, last = (batch_of_step(step, request.train.skip_batches) for step in spike)
    batches = str(first) if first == last else f"{first}-{last}"
    taken = f"the spike took {'batch' if first == last else 'batches'} {batches}"
    without = "it" if first == last else "them"
    saved = [int(path.name.rpartition("-")[2]) for path in checkpoint_folders(
        folder / CHECKPOINT_FOLDER
    )]  # fmt: skip
    before = [step for step in saved if step < spike[0]]
    run = shlex.quote(str(folder))
    if not before:
        return (
            f"{taken}, and no checkpoint from before it is kept; a new run with "
            f"`train.skip_batches={batches}` leaves {without} out"
        )
    if max(saved) < spike[0]:
        return f"{taken}; `windlass resume {run} --skip-batches {batches}` leaves {without} out"
    command = f"windlass train --from {run}@{max(before)} --continue train.skip_batches={batches}"
    return f"{taken}; `{command}` goes on from step {max(before)} without {without}"
