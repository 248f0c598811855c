"""What an engine of others can say of a plan, by engine and version: files of data, and no code."""

from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field

from windlass.document import Document
from windlass.errors import RequestError, did_you_mean, shorten

Scalar = bool | int | float | str
"""A value in a configuration."""


class StageTokens(Document):
    """How a configuration names the layers of each pipeline stage."""

    first: str
    """Name of the embedding."""
    block: str
    """Name of a block; `{}` is its index."""
    last: tuple[str, ...]
    """Names of what follows the last block."""
    join: str
    """What stands between names of a stage."""
    nested: bool = False
    """Whether a stage is a list of names, not a word."""
    between: str | None = None
    """What stands between stages in one word; None gives each stage a word of its own."""


class Row(Document):
    """One field of a plan, and how an engine says it."""

    key: str | None = None
    """Key of the configuration that has the value as it is."""
    values: dict[str, dict[str, Scalar]] | None = None
    """What is written for each value that the engine can say; others are refused."""
    only: tuple[Scalar, ...] | None = None
    """Values that the engine can say, if not all."""
    never: tuple[Scalar, ...] = ()
    """Values that it cannot say."""
    default: Scalar | None = None
    """The field's value where the configuration does not mention it."""
    tokens: StageTokens | None = None
    """For the layers of pipeline stages: how they are named."""
    file: str | None = None
    """File that holds it; None means the first one."""
    because: str = ""
    """Why other values cannot be said."""
    note: str = ""
    """What else a reader should know of it."""


class EngineFile(Document):
    """One version of an engine: its files, and how it says each field of a plan."""

    name: str
    version: str
    about: str
    source: str
    """Where the keys were read."""
    checked: Literal["parser", "schema"]
    """Whether exports are tested by the engine's own parser, or against its recorded fields."""
    starter: str = '"${TORCHRUN:-torchrun}" --nnodes NODES --nproc-per-node PER_NODE'
    """What starts the ranks of a host; NODES and PER_NODE stand for their numbers."""
    place: str = '--node-rank "$NODE_RANK" --master-addr "$HEAD" --master-port "$PORT"'
    """Its options on one of several hosts."""
    command: str
    """What it starts on each rank; `"$@"` are the words of an `.args` file."""
    files: dict[str, dict[str, Scalar]]
    """Files of the configuration, each with what is the same in all of them; the first holds every
    field whose row names none."""
    model: Literal["name", "fields", "folder"]
    """How the model is said: by a name of the engine's, by its sizes, or by a folder with a
    `config.json`, which is written too."""
    logs_by_callback: bool = False
    """Whether it logs no times, so that an export has a file that does."""
    fields: dict[str, Row]
    unknown: tuple[str, ...] = Field(min_length=1)
    """What Windlass does not know about this engine, a sentence each."""

    @property
    def main_file(self) -> str:
        """The file that holds every field whose row names none."""
        return next(iter(self.files))

    @property
    def label(self) -> str:
        """Name and version, as `--to` takes them."""
        return f"{self.name}@{self.version}"


def engine_versions() -> dict[str, tuple[str, ...]]:
    """The versions of each engine that there is a file for, newest last."""
    return {
        folder.name: versions
        for folder in sorted(_folder().iterdir())
        if folder.is_dir()
        and (versions := tuple(sorted((path.stem for path in folder.glob("*.toml")), key=_order)))
    }


def callback_text() -> str:
    """The text of `windlass_log.py`, which writes what `adopt` reads."""
    return (_folder() / "windlass_log.py.txt").read_text(encoding="utf-8")


def load_engine(name: str) -> EngineFile:
    """The file of `ENGINE` in its newest known version, or of `ENGINE@VERSION`.

    Raises:
        RequestError: no such engine, or no file for that version of it.
    """
    engine, _, version = name.partition("@")
    known = engine_versions()
    if engine not in known:
        raise RequestError(
            f"unknown engine `{shorten(engine)}`{did_you_mean(engine, tuple(known))}; known are "
            f"{', '.join(f'`{each}`' for each in known)}"
        )
    version = version or known[engine][-1]
    if version not in known[engine]:
        nearest = min(known[engine], key=lambda each: _distance(each, version))
        raise RequestError(
            f"`{engine}@{shorten(version)}`: no file says what that version reads, and names of "
            f"fields change between versions; the nearest known is `{engine}@{nearest}`"
        )
    return EngineFile.load(_folder() / engine / f"{version}.toml")


def _folder() -> Path:
    return Path(str(files("windlass.engines")))


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))


def _distance(version: str, wanted: str) -> tuple[int, ...]:
    """How far apart two versions are, the first part first."""
    mine, other = _order(version), _order(wanted)
    return tuple(abs(a - b) for a, b in zip((*mine, 0, 0), (*other, 0, 0), strict=False))
