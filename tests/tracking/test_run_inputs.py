"""Each of the seven inputs has a fingerprint, which changes with what the input means only."""

import hashlib
from pathlib import Path
from typing import get_args

import numpy as np

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.data import ExampleDataset, prepare_dataset
from windlass.schema import (
    CODE_FILE,
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    GRAPH_FILE,
    MACHINE_FILE,
    PLAN_FILE,
    REQUEST_FILE,
    CodeSnapshot,
    CodeTree,
    DataManifest,
    DataRequest,
    Graph,
    InputName,
    Machine,
    Plan,
    Request,
    RunConfig,
)
from windlass.tracking.environment import collect_environment
from windlass.tracking.run_inputs import input_fingerprints, make_data_manifest


def save_inputs(folder: Path) -> None:
    graph, code = tiny_graph(), CodeSnapshot(windlass=CodeTree(commit="1a"))
    examples = ExampleDataset(
        inputs=np.arange(12).reshape(3, 4), targets=np.arange(12).reshape(3, 4), held_out=1
    )
    documents = {
        REQUEST_FILE: Request(),
        PLAN_FILE: tiny_plan(graph, tiny_machine()),
        GRAPH_FILE: graph,
        MACHINE_FILE: tiny_machine(),
        ENVIRONMENT_FILE: collect_environment(["a"], code),
        CODE_FILE: code,
        DATA_FILE: make_data_manifest(examples),
    }
    for name, document in documents.items():
        document.save(folder / name)


def test_each_input_has_a_fingerprint_that_only_its_own_change_alters(tmp_path: Path):
    save_inputs(tmp_path)
    first = input_fingerprints(tmp_path)
    assert list(first) == list(get_args(InputName))
    changes = {
        "request": (REQUEST_FILE, Request, {"train.steps": 7}),
        "plan": (PLAN_FILE, Plan, {"compile": True}),
        "graph": (GRAPH_FILE, Graph, {"vocabulary": 65}),
        "machine": (MACHINE_FILE, Machine, {"name": "other"}),
    }
    for name, (file, kind, change) in changes.items():
        overrides = [f"{key}={str(value).lower()}" for key, value in change.items()]
        kind.resolve(tmp_path / file, overrides).save(tmp_path / file)
        after = input_fingerprints(tmp_path)
        assert [key for key in first if first[key] != after[key]] == [name]
        first = after


def test_a_name_a_path_and_a_command_line_change_no_fingerprint(tmp_path: Path):
    save_inputs(tmp_path)
    first = input_fingerprints(tmp_path)
    Plan.resolve(tmp_path / PLAN_FILE, ["model.name=another"]).save(tmp_path / PLAN_FILE)
    collect_environment(["b", "c"]).save(tmp_path / ENVIRONMENT_FILE)
    text = (tmp_path / REQUEST_FILE).read_text()
    (tmp_path / REQUEST_FILE).write_text(f"# a comment\n{text}")
    assert input_fingerprints(tmp_path) == first


def test_missing_inputs_are_left_out_and_damaged_ones_are_taken_as_they_are(tmp_path: Path):
    (tmp_path / PLAN_FILE).write_bytes(b"\xff not TOML")
    RunConfig(values={"lr": float("nan")}).save(tmp_path / CONFIG_FILE)
    fingerprints = input_fingerprints(tmp_path)
    assert list(fingerprints) == ["request", "plan"]
    assert fingerprints["plan"] == hashlib.sha256(b"\xff not TOML").hexdigest()[:12]


def test_a_manifest_of_examples_tells_training_from_held_out_data():
    inputs = np.arange(12).reshape(3, 4)
    manifests = [
        make_data_manifest(ExampleDataset(inputs=inputs, targets=inputs + change, held_out=1))
        for change in (np.zeros((3, 4)), np.eye(3, 4) * [[0], [0], [1]])
    ]
    one, other = (manifest.train for manifest in manifests)
    assert one == other
    assert (one.documents, one.tokens) == (2, 8)
    assert manifests[0].held_out.tokens_sha256 != manifests[1].held_out.tokens_sha256


def test_a_manifest_of_a_text_has_hashes_of_tokens_tokenizer_split_and_documents(tmp_path: Path):
    (tmp_path / "text").mkdir()
    for name in "abcdefgh":
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} said hello. " * 200)

    def manifest(folder: str, **change: object) -> DataManifest:
        request = DataRequest(source=str(tmp_path / folder), tokenizer="byte").model_copy(
            update={"held_out": 0.4} | change
        )
        tokens = prepare_dataset(request, cache=tmp_path / "cache")
        return make_data_manifest(tokens, request.sources)

    first = manifest("text")
    assert (first.train.documents + first.held_out.documents, first.kind) == (8, "text")
    assert manifest("text", held_out=0.7).train != first.train
    (tmp_path / "text").rename(tmp_path / "moved")
    assert manifest("moved").fingerprint() == first.fingerprint()
    (tmp_path / "moved" / "a.txt").rename(tmp_path / "moved" / "z.txt")
    assert manifest("moved").fingerprint() != first.fingerprint()
