"""Answers as JSON, and the parameters of requests."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from windlass.record import Curve

_MOST_NAMES = 200


def json_answer(value: object, status: int = 200) -> Response:
    """An answer in JSON; numbers that are not finite are null."""
    try:
        content = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        content = json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=False)
    return Response(content.encode(), status, media_type="application/json")


def curves_answer(curves: Mapping[str, Mapping[str, Curve]]) -> Response:
    """Curves as JSON, by run and then by name.

    Each has `steps`, `median`, and `low` and `high` where a bucket holds several values.
    """
    runs = {
        run: ",".join(f"{json.dumps(name)}:{_curve(curve)}" for name, curve in named.items())
        for run, named in curves.items()
    }
    content = ",".join(f"{json.dumps(run)}:{{{text}}}" for run, text in runs.items())
    return Response(f'{{"curves":{{{content}}}}}'.encode(), media_type="application/json")


def names_of(request: Request, key: str, default: Sequence[str] = ()) -> tuple[str, ...]:
    """The words of a parameter, `a,b`, without repetitions.

    Raises:
        HTTPException: there are more than 200 of them.
    """
    text = ",".join(request.query_params.getlist(key))
    names = tuple(dict.fromkeys(filter(None, text.split(",")))) or tuple(default)
    if len(names) > _MOST_NAMES:
        raise HTTPException(400, f"`{key}` has {len(names)} words, more than {_MOST_NAMES}")
    return names


def number_of(request: Request, key: str, default: int, most: int) -> int:
    """A parameter that is a number from 0 to `most`.

    Raises:
        HTTPException: it is none.
    """
    text = request.query_params.get(key, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) <= most):
        raise HTTPException(400, f"`{key}` should be a number from 0 to {most}")
    return int(text)


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object that a request brings.

    Raises:
        HTTPException: it brings something else.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0]
    try:
        body = json.loads(await request.body()) if content_type == "application/json" else None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body should be a JSON object, sent as `application/json`")
    return body


def _curve(curve: Curve) -> str:
    parts = {"steps": _list(curve.steps), "median": _numbers(curve.median)}
    if not _equal(curve.low, curve.high):
        parts |= {"low": _numbers(curve.low), "high": _numbers(curve.high)}
    return "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"


def _equal(low: npt.NDArray[np.float32], high: npt.NDArray[np.float32]) -> bool:
    return bool(np.array_equal(low, high, equal_nan=True))


def _numbers(values: npt.NDArray[np.float32]) -> str:
    """The shortest digits that tell each number from its neighbours."""
    return _list(np.where(np.isfinite(values), values.astype("U16"), "null"))


def _list(values: npt.NDArray[Any]) -> str:
    return "[" + ",".join(values.astype(str).tolist()) + "]"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
