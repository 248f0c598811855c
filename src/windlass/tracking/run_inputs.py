"""The seven inputs of a run, each a file of its folder, and their fingerprints."""

import contextlib
import hashlib
import tomllib
from functools import lru_cache
from pathlib import Path

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
    Environment,
    Graph,
    InputName,
    Machine,
    Plan,
    Request,
    RunConfig,
)

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
            content = (folder / file).read_bytes()
            fingerprints.setdefault(name, _fingerprint(kind, content, file.endswith(".toml")))
    return fingerprints


@lru_cache(maxsize=256)
def _fingerprint(kind: type[Document], content: bytes, is_toml: bool) -> str:
    """The fingerprint of a file's content; runs share most of their inputs."""
    try:
        if is_toml:
            return kind.model_validate(tomllib.loads(content.decode())).fingerprint()
        return kind.model_validate_json(content).fingerprint()
    except (ValueError, RecursionError):
        return hashlib.sha256(content).hexdigest()[:_FINGERPRINT_DIGITS]
