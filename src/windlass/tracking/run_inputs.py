"""The seven inputs of a run, each a file of its folder: their fingerprints, and what data is."""

import contextlib
import hashlib
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.atomic_files import read_regular_file
from windlass.document import Document
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
    DataManifest,
    DataSplit,
    Environment,
    Graph,
    InputName,
    Machine,
    Plan,
    Request,
    RunConfig,
)

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, SplitMeta, TokenDataset

INPUT_FILES: tuple[tuple[InputName, str, type[Document]], ...] = (
    ("request", REQUEST_FILE, Request),
    ("request", CONFIG_FILE, RunConfig),
    ("plan", PLAN_FILE, Plan),
    ("graph", GRAPH_FILE, Graph),
    ("machine", MACHINE_FILE, Machine),
    ("environment", ENVIRONMENT_FILE, Environment),
    ("code", CODE_FILE, CodeSnapshot),
    ("data", DATA_FILE, DataManifest),
)
"""Name, file and kind of each input; a run of a loop that is not Windlass's own has its settings in
place of a request."""
_FINGERPRINT_DIGITS = 12


def input_fingerprints(folder: Path) -> dict[InputName, str]:
    """Twelve hexadecimal digits for each input of a run; equal digits mean the same input.

    They cover what an input means: not the name of a plan, the sources of a machine's figures or
    the path of a text. The environment's covers packages, Python, system, processor, threads and
    variables, and leaves out host and command line; the code has a fingerprint of its own. An input
    that the folder lacks is left out, and one that this version cannot read is taken byte by byte.

    Args:
        folder: the run folder; later attempts have replaced what they changed.
    """
    fingerprints: dict[InputName, str] = {}
    for name, file, kind in INPUT_FILES:
        with contextlib.suppress(OSError):
            content = read_regular_file(folder / file)
            fingerprints.setdefault(name, _fingerprint(kind, content, file.endswith(".toml")))
    return fingerprints


def make_data_manifest(
    data: "TokenDataset | ExampleDataset", sources: Sequence[str] = ()
) -> DataManifest:
    """What a run is trained on and evaluated with.

    Args:
        sources: the sources as the request names them.
    """
    from windlass.data import ExampleDataset

    if isinstance(data, ExampleDataset):
        return _of_examples(data)
    meta, files = data.meta, data.meta.files
    return DataManifest(
        kind="text",
        sources=tuple(sources),
        tokenizer_sha256=files["tokenizer.json"].sha256,
        vocabulary=data.vocabulary,
        train=_of_text(data, "train", meta.train),
        held_out=_of_text(data, "held_out", meta.held_out),
    )


def _of_text(data: "TokenDataset", split: str, meta: "SplitMeta") -> DataSplit:
    from windlass.data import document_files

    hashes = (data.meta.files[name].sha256 for name in document_files(split))
    return DataSplit(
        tokens=meta.tokens,
        documents=meta.documents,
        tokens_sha256=meta.sha256,
        documents_sha256=hashlib.sha256(" ".join(hashes).encode()).hexdigest(),
    )


def _of_examples(data: "ExampleDataset") -> DataManifest:
    first_held_out = len(data.inputs) - data.held_out
    splits = [
        DataSplit(
            tokens=data.inputs[part].size,
            documents=len(data.inputs[part]),
            tokens_sha256=hashlib.sha256(
                data.inputs[part].tobytes() + data.targets[part].tobytes()
            ).hexdigest(),
        )
        for part in (slice(first_held_out), slice(first_held_out, None))
    ]
    return DataManifest(
        kind="examples", vocabulary=data.vocabulary, train=splits[0], held_out=splits[1]
    )


@lru_cache(maxsize=256)
def _fingerprint(kind: type[Document], content: bytes, is_toml: bool) -> str:
    """The fingerprint of a file's content; runs share most of their inputs."""
    try:
        if is_toml:
            return kind.model_validate(tomllib.loads(content.decode())).fingerprint()
        return kind.model_validate_json(content).fingerprint()
    except (ValueError, RecursionError):
        return hashlib.sha256(content).hexdigest()[:_FINGERPRINT_DIGITS]
