"""Request: valid values, and that a request survives its file."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel

from windlass.document import leaf_fields, value_types
from windlass.errors import InputErrors
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction
from windlass.schema.request import Request
from windlass.schema.train_request import TrainRequest


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
        "train.clip=0", "model.dropout=1", "memory=lots", "memory=1e999", "precision=float3",
        "data.held_out=1", "data.vocabulary=255", "parallel.schedule=2f2b", "recompute=all",
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


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("lr=3e-4", "train.learning_rate"), ("train.lr=1", "train.learning_rate"),
        ("optimizer.lr=1", "train.learning_rate"),
        ("train.dropout=0.1", "model.dropout` or `lora.dropout"),
        ("betas=0.9,0.95", "train.betas"), ("batch_size=8", "train.batch"),
        ("epochs=3", "train.steps"), ("hidden_size=64", "model.width"),
        ("num_layers=2", "model.layers"), ("n_head=2", "model.heads"), ("tp=2", "parallel.tensor"),
        ("pp=2", "parallel.pipeline"), ("dp=2", "parallel.data"), ("seq_len=8", "train.sequence"),
        ("gradient_accumulation_steps=4", "batch.accumulation"), ("fsdp=8", "sharding.parameters"),
        ("zero=3", "sharding.parameters` or `sharding.optimizer"),
        ("activation_checkpoint.mode=full", "recompute"), ("learning_rat=1", "train.learning_rate"),
        ("sequence=8", "model.sequence` or `train.sequence"), ("precision=bf16", "bfloat16"),
        ("precision=fp32", "float32"), ("recompute=true", "full"), ("moments=8bit", "int8"),
        ("parallel.schedule=1F1B", "1f1b"), ("parallel.schedule=zb", "zero-bubble"),
    ],
)  # fmt: skip
def test_the_fields_other_words_are_understood_as_a_hint(override: str, meant: str):
    with pytest.raises(InputErrors) as caught:
        Request.resolve(None, [override])
    assert str(caught.value).endswith(f"; did you mean `{meant}`?")


def test_every_synonym_is_of_a_key_or_value_of_a_request():
    fields = dict(leaf_fields(Request))
    assert set(Request.synonyms().keys) <= set(fields)
    values = {
        value
        for field in fields.values()
        for kind in value_types(field.annotation)
        for value in get_args(kind)
    }
    assert set(Request.synonyms().values) <= values


def test_every_key_has_a_meaning():
    assert [key for key, field in leaf_fields(Request) if not field.description] == []


def test_a_text_with_commas_is_a_list_where_only_a_list_can_be_meant():
    request = Request.resolve(None, ["train.betas=0.8,0.9", "data.source=a,b"])
    assert request.train.betas == (0.8, 0.9)
    assert request.data.source == "a,b"


def test_the_origin_of_a_value_is_its_line_or_its_override(tmp_path: Path):
    path = tmp_path / "request.toml"
    path.write_text("# mine\n[train]\nsteps = 3\nbatch = 4\n")
    origins = Request.origins(path, ["train.batch=8"])
    assert origins["train.steps"] == f"{path}:3"
    assert origins["train.batch"] == "override `train.batch=8`"


def test_other_keys_of_a_model_file_are_arguments_of_its_function_wherever_they_stand(
    tmp_path: Path,
):
    (file := tmp_path / "t.toml").write_text('[model]\nname = "a.py:b"\nn_layer = 3\n')
    request = Request.resolve(file, ["model.vocab_size=256", "model.arguments.name=x"])

    assert request.model.arguments == {"n_layer": 3, "vocab_size": 256, "name": "x"}
    request.save(tmp_path / "saved.toml")
    assert Request.load(tmp_path / "saved.toml") == request
    assert request.model_identity.dials == request.model.dials
    with pytest.raises(InputErrors, match=r"unknown key `model.n_layer`; did you mean `model.lay"):
        Request.resolve(None, ["model.n_layer=3"])


def test_an_error_of_two_keys_names_the_override_of_the_key_that_it_begins_with():
    words = ("train.sequence=64", "train.optimizer=schedule-free", "train.ema=0.9")
    with pytest.raises(InputErrors, match=r"^override `train.ema=0.9`: `train`: `ema` = 0.9"):
        Request.resolve(None, words)
