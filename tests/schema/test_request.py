"""Request: valid values, and that a request survives its file."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel

from windlass.errors import InputErrors
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction
from windlass.schema.request import Request, TrainRequest


@pytest.mark.parametrize("name", ["request.toml", "request.json"])
@pytest.mark.parametrize("clip", [None, 0.5, 1.0])
def test_a_request_survives_its_file_with_any_clip(tmp_path: Path, name: str, clip: float | None):
    request = Request(train=TrainRequest(clip=clip), memory=2**30)
    request.save(tmp_path / name)
    assert Request.load(tmp_path / name) == request
    assert Request.load(tmp_path / name).fingerprint() == request.fingerprint()


def test_an_infinite_clip_never_clips():
    assert Request.resolve(None, ["train.clip=inf"]).train.clip is None


@given(near=st.integers(1, 64))
def test_a_budget_may_be_written_with_its_unit(near: int):
    assert Request.resolve(None, [f"memory={near} GiB"]).memory == near * 2**30


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=0", "train.batch=ten", "train.betas=[0.9,1.0]", "train.learning_rate=nan",
        "train.clip=0", "model.dropout=1", "memory=lots", "memory=1e999", "precision=float16",
        "data.held_out=1", "data.vocabulary=256", "parallel.schedule=2f2b", "recompute=all",
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_an_error_of_the_override(override: str):
    with pytest.raises(InputErrors) as caught:
        Request.resolve(None, [override])
    [fault] = caught.value.messages
    assert fault.startswith(f"override `{override}`: `{override.split('=')[0]}")


@pytest.mark.parametrize("document", [Request, Plan, Machine, Prediction])
def test_a_value_left_out_of_a_file_reads_back_as_none(document: type[BaseModel]):
    # A file has no word for None, so None must be the default wherever it is allowed.
    fields = [
        (part, name, field)
        for part in _parts(document)
        for name, field in part.model_fields.items()
    ]
    told = {(TrainRequest, "clip")}  # written as `inf`
    for part, name, field in fields:
        takes_none = type(None) in getattr(field.annotation, "__args__", ())
        assert not takes_none or field.default is None or (part, name) in told, (part, name)


def _parts(document: type[BaseModel]) -> set[type[BaseModel]]:
    found = {document}
    for field in document.model_fields.values():
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found |= _parts(inner)
    return found
