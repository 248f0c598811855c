"""What the API can be asked, as an OpenAPI document."""

from typing import Any, Literal, NamedTuple

_VERSION = "1"
Kind = Literal["string", "integer", "boolean"]


class Parameter(NamedTuple):
    """One parameter of a query."""

    name: str
    text: str
    kind: Kind = "string"
    required: bool = False


class Operation(NamedTuple):
    """What one method of a path does."""

    method: Literal["get", "post", "put"]
    path: str
    text: str
    parameters: tuple[Parameter, ...] = ()
    body: str | None = None
    """Media type of what is sent; None if nothing is."""
    answer: str = "application/json"


_FILE = "/api/sync/runs/{id}/files/{name}"
OPERATIONS = (
    Operation(
        "get", "/api/runs", "Some columns of the runs that pass a filter.",
        (
            Parameter("filter", 'Such as `model = "gpt-tiny" and loss < 5`.'),
            Parameter("sort", "A column, setting or series; `-` before it reverses the order."),
            Parameter(
                "columns",
                "Columns, settings and series with commas between them; `differing` stands for the "
                "settings that tell the runs of a sweep apart.",
            ),
            Parameter("archived", "`no`, `yes` or `all`."),
            Parameter("ids", "Only these runs, with commas between them."),
            Parameter("limit", "Most rows, at most 5000.", "integer"),
            Parameter("offset", "Rows to leave out first.", "integer"),
        ),
    ),
    Operation("get", "/api/columns", "Names of all columns, settings, series and tags."),
    Operation("get", "/api/runs/{id}", "One run beside its prediction."),
    Operation("get", "/api/runs/{id}/events", "Attempts, evaluations, checkpoints, alerts."),
    Operation("get", "/api/runs/{id}/inputs", "The seven inputs, with fingerprints and texts."),
    Operation("get", "/api/runs/{id}/timeline", "One step by instruction: predicted, measured."),
    Operation("get", "/api/runs/{id}/verdict", "The verdict on the run as it is now."),
    Operation(
        "post", "/api/runs/{id}/annotations",
        "Adds a change: `tags`, `remove`, `note`, `archived`, `broken`.", (), "application/json",
    ),
    Operation(
        "get", "/api/curves", "Series of runs in buckets, each with minimum, median and maximum.",
        (
            Parameter("ids", "Runs with commas between them.", required=True),
            Parameter("names", "Series with commas between them."),
            Parameter("points", "Most buckets of a curve, at most 500.", "integer"),
        ),
    ),
    Operation(
        "get", "/api/diff", "What differs between runs, in units of the noise floor.",
        (
            Parameter("a", "The first run."), Parameter("b", "The second run."),
            Parameter("ids", "Runs with commas between them, in place of `a` and `b`."),
        ),
    ),
    Operation(
        "get", "/api/live", "Server-sent events: `runs` that have changed, new `points`.",
        (
            Parameter("since", "A version of the table of runs.", "integer"),
            Parameter("ids", "Runs whose points are sent."),
            Parameter("after", "The last step that is known of each of them."),
            Parameter("names", "Series whose points are sent."),
        ),
        None, "text/event-stream",
    ),
    Operation(
        "get", "/api/page", "A view of the page as one HTML file.",
        (
            Parameter("view", "The address of the view behind `#`."),
            Parameter("path", "A path of this API whose answer the view shows; repeated."),
        ),
        None, "text/html",
    ),
    Operation(
        "post", "/api/login", "Exchanges the token for a cookie.", (), "application/json",
        "text/plain",
    ),
    Operation("get", "/api/openapi.json", "This document."),
    Operation("get", "/api/sync/runs", "The folder of each run by its id."),
    Operation("get", "/api/sync/runs/{id}", "The size of each file of a run by its name."),
    Operation(
        "get", _FILE, "A file of a run.",
        (
            Parameter("length", "Only so many of its first bytes.", "integer"),
            Parameter("digest", "`1` gives its SHA-256 in place of its content."),
        ),
        None, "application/octet-stream",
    ),
    Operation(
        "put", _FILE, "Takes a whole file; nothing that is here is lost.",
        (Parameter("folder", "The name of the run's folder there.", required=True),),
        "application/octet-stream", "text/plain",
    ),
)  # fmt: skip
"""All operations of the API."""


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of the API."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Windlass record", "version": _VERSION},
        "security": [{"token": []}],
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


def _described(operation: Operation) -> dict[str, Any]:
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    found: dict[str, Any] = {
        "summary": operation.text,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
        + [
            {
                "name": one.name, "in": "query", "required": one.required,
                "description": one.text, "schema": {"type": one.kind},
            }
            for one in operation.parameters
        ],
        "responses": {
            "200": {"description": operation.text, "content": {operation.answer: {}}},
            "default": {"description": "What is wrong, in words.", "content": {"text/plain": {}}},
        },
    }  # fmt: skip
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": {operation.body: {}}}
    return found
