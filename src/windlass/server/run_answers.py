"""The questions on runs that the API answers: their table, one of them, its curves and files."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from windlass.atomic_files import read_regular_file
from windlass.document import Document
from windlass.errors import InputErrors, RecordError, RequestError, shorten
from windlass.record import COLUMNS, Catalog, RunQuery, RunRow
from windlass.report import describe_sigmas, input_line, kind_colour, most_memory_bytes
from windlass.schema import (
    MEASURED_TIMELINE_FILE,
    PREDICTED_TIMELINE_FILE,
    PREDICTION_FILE,
    Prediction,
    Timeline,
)
from windlass.server.answers import curves_answer, json_answer, names_of, number_of
from windlass.server.change_feed import ChangeFeed
from windlass.tracking import INPUT_FILES, JournalCursor, input_fingerprints, journal_files

if TYPE_CHECKING:
    from windlass.judge import RunDiff, Verdict

D = TypeVar("D", bound=Document)
DEFAULT_COLUMNS = (
    "id", "name", "state", "started", "model", "machine", "step", "steps", "loss",
    "held_out_loss", "metric", "metric_value", "seconds", "predicted_seconds", "low_seconds",
    "high_seconds", "tokens_per_second", "memory_bytes", "verdict", "tags", "notes", "archived",
    "broken", "group",
)  # fmt: skip
"""The columns of the table of runs, unless a request names others."""
DIFFERING = "differing"
"""Stands for the settings that tell the runs of a group apart."""
_UNITS = dict(COLUMNS)
_ARCHIVED: Mapping[str, bool | None] = {"no": False, "yes": True, "all": None}
_MOST_ROWS, _MOST_POINTS, _MOST_RUNS = 5000, 500, 100
_INPUT_CHARACTERS = 2**16
_MOST_INSTRUCTIONS = 100_000


class Analyses(NamedTuple):
    """What is worked out of runs by a layer above the server."""

    diff: "Callable[[Sequence[Path]], RunDiff]"
    """What differs between runs, by their folders."""
    judge: "Callable[[Path], Verdict]"
    """The verdict on a run, by its folder."""


class RunAnswers:
    """Answers questions on runs."""

    def __init__(self, catalog: Catalog, feed: ChangeFeed, analyses: Analyses) -> None:
        self._catalog, self._feed, self._analyses = catalog, feed, analyses

    def routes(self) -> list[Route]:
        """The paths that are answered."""
        return [
            Route("/api/runs", self.runs),
            Route("/api/columns", self.columns),
            Route("/api/curves", self.curves),
            Route("/api/diff", self.diff),
            Route("/api/runs/{id}", self.run),
            Route("/api/runs/{id}/events", self.events),
            Route("/api/runs/{id}/inputs", self.inputs),
            Route("/api/runs/{id}/timeline", self.timeline),
            Route("/api/runs/{id}/verdict", self.verdict),
        ]

    def runs(self, request: Request) -> Response:
        """Some columns of the runs that pass a filter."""
        self._feed.look()
        columns = names_of(request, "columns", DEFAULT_COLUMNS)
        query = _query(request)
        version = self._feed.version
        differing = self._catalog.differing_settings(query) if DIFFERING in columns else ()
        places = (differing if name == DIFFERING else (name,) for name in columns)
        columns = tuple(dict.fromkeys(name for names in places for name in names))
        rows = self._catalog.table(columns, query)
        return json_answer(
            {
                "columns": [{"name": name, "unit": _UNITS.get(name, "value")} for name in columns],
                "differing": differing,
                "rows": rows,
                "total": self._catalog.count(query),
                "version": version,
                "fault": self._feed.fault,
            }
        )

    def columns(self, request: Request) -> Response:  # noqa: ARG002
        """The names of all columns: those of every run, settings and series."""
        return json_answer(
            {
                "columns": [{"name": name, "unit": unit} for name, unit in COLUMNS],
                "others": list(self._catalog.names()),
                "tags": dict(self._catalog.tags()),
            }
        )

    def run(self, request: Request) -> Response:
        """One run beside its prediction."""
        self._feed.look()
        row = self.row(request)
        prediction = _document(Prediction, row.folder / PREDICTION_FILE)
        columns = {name: getattr(row, name) for name, _ in COLUMNS} | {"folder": str(row.folder)}
        columns |= {name: dict(columns[name]) for name in ("kinds", "inputs", "settings")}
        return json_answer(
            columns
            | {
                "short_id": row.short_id,
                "colours": {
                    kind: _colour(kind)
                    for kind in (*row.kinds, *(prediction.by_kind if prediction else ()))
                },
                "series": {name: asdict(one) for name, one in self._catalog.series(row.id).items()},
                "prediction": None if prediction is None else prediction.model_dump(mode="json"),
                "most_memory_bytes": most_memory_bytes(prediction),
                "peers": len(self._catalog.peers(row.id)),
                "version": self._feed.version,
            }
        )

    def curves(self, request: Request) -> Response:
        """Series of runs as a few hundred points each."""
        self._feed.look()
        ids, names = names_of(request, "ids"), names_of(request, "names", ("loss",))
        if len(ids) > _MOST_RUNS:
            raise HTTPException(400, f"{len(ids)} runs at once are more than {_MOST_RUNS}")
        points = number_of(request, "points", _MOST_POINTS, _MOST_POINTS)
        try:
            return curves_answer(self._catalog.curves(ids, names, max(1, points)))
        except RecordError:
            raise HTTPException(404, "one of these runs is not there") from None

    def events(self, request: Request) -> Response:
        """What happened in a run: attempts, evaluations, checkpoints, alerts, verdicts, its end."""
        found = []
        for file in journal_files(self.row(request).folder):
            if file.rank == 0:
                with contextlib.suppress(RecordError, ValueError, KeyError, TypeError):
                    for event in JournalCursor(file.path).read().events:
                        one = {"event": event.name, "time": event.time, "attempt": file.attempt}
                        found.append(dict(event.fields) | one)
        return json_answer({"events": found})

    def inputs(self, request: Request) -> Response:
        """The seven inputs of a run: fingerprint and the beginning of the text."""
        folder = self.row(request).folder
        prints = input_fingerprints(folder)
        found = []
        for name, file, _ in INPUT_FILES:
            with contextlib.suppress(OSError):
                text = read_regular_file(folder / file).decode(errors="replace")
                found.append(
                    {
                        "input": name,
                        "file": file,
                        "fingerprint": prints.get(name),
                        "characters": len(text),
                        "text": text[:_INPUT_CHARACTERS],
                    }
                )
        return json_answer({"inputs": found})

    def timeline(self, request: Request) -> Response:
        """One step of each device, instruction by instruction, predicted and measured."""
        folder = self.row(request).folder
        kinds: dict[str, int] = {}
        lanes: list[dict[str, object]] = []
        left = _MOST_INSTRUCTIONS
        for name, file in (
            ("predicted", PREDICTED_TIMELINE_FILE),
            ("measured", MEASURED_TIMELINE_FILE),
        ):
            timeline = _document(Timeline, folder / file)
            for lane in timeline.devices if timeline else ():
                left -= len(lane.kinds)
                if left >= 0:
                    lanes.append(
                        {
                            "name": name,
                            "device": lane.device,
                            "kinds": [kinds.setdefault(kind, len(kinds)) for kind in lane.kinds],
                            "layers": lane.layers,
                            "micro_batches": lane.micro_batches,
                            "starts": lane.starts,
                            "ends": lane.ends,
                            "memory_bytes": lane.memory_bytes,
                        }
                    )
        named = [{"name": kind, "colour": _colour(kind)} for kind in kinds]
        return json_answer({"kinds": named, "lanes": lanes, "is_cut": left < 0})

    def diff(self, request: Request) -> Response:
        """What differs between runs."""
        named = (request.query_params.get(key, "") for key in ("a", "b"))
        ids = [*filter(None, named), *names_of(request, "ids")]
        if not 2 <= len(ids) <= _MOST_RUNS:
            raise HTTPException(400, f"name 2 to {_MOST_RUNS} runs: `?a=ID&b=ID`, or `?ids=ID,ID`")
        found = self._analyses.diff([self._row(run).folder for run in ids])
        return json_answer(
            {
                "runs": [_head(run) for run in found.runs],
                "summary": input_line(found),
                "inputs": {str(name): state for name, state in found.inputs.items()},
                "keys": [asdict(one) for one in found.keys],
                "omitted": {str(name): count for name, count in found.omitted.items()},
                "code": found.code,
                "results": [
                    {
                        "name": one.name,
                        "unit": one.unit,
                        "values": one.values,
                        "differences": [
                            describe_sigmas(one, index) for index in range(1, len(one.values))
                        ],
                        "sigmas": [one.sigmas(index) for index in range(1, len(one.values))],
                    }
                    for one in found.results
                ],
            }
        )

    def verdict(self, request: Request) -> Response:
        """The verdict on a run as it is now."""
        verdict = self._analyses.judge(self.row(request).folder)
        return json_answer(verdict.model_dump(mode="json"))

    def row(self, request: Request) -> RunRow:
        """The run that the path names; its folder is the one that the catalogue found."""
        return self._row(request.path_params["id"])

    def _row(self, run: str) -> RunRow:
        try:
            return self._catalog.row(run)
        except RecordError:
            raise HTTPException(404, f"there is no run `{shorten(run)}`") from None


def _query(request: Request) -> RunQuery:
    """The runs that a request asks for."""
    archived = request.query_params.get("archived", "no")
    if archived not in _ARCHIVED:
        raise HTTPException(400, f"`archived` should be one of {', '.join(_ARCHIVED)}")
    conditions = [request.query_params.get("filter", "").strip()]
    if ids := names_of(request, "ids"):
        words = ", ".join('"' + run.replace('"', '""') + '"' for run in ids)
        conditions.append(f"id in ({words})")
    conditions = [one for one in conditions if one]
    if len(conditions) > 1:
        conditions = [f"({one})" for one in conditions]
    return RunQuery(
        filter=" and ".join(conditions) or None,
        sort=request.query_params.get("sort", "-id"),
        limit=number_of(request, "limit", 200, _MOST_ROWS),
        offset=number_of(request, "offset", 0, 10**9),
        archived=_ARCHIVED[archived],
    )


def _colour(kind: str) -> str:
    """The palette's name of the colour of an instruction kind."""
    return kind_colour(kind).removeprefix("var(--").removesuffix(")")


def _head(run: RunRow) -> dict[str, Any]:
    names = ("id", "short_id", "name", "state", "model", "machine", "step", "started", "verdict")
    return {name: getattr(run, name) for name in names}


def _document(kind: type[D], path: Path) -> D | None:
    """The document; None if it is missing or damaged, which the faults of the run tell."""
    with contextlib.suppress(OSError, RequestError, InputErrors):
        return kind.load(path)
    return None
