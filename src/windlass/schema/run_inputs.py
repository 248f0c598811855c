"""Inputs of a run that no request names: its code and its data, each a file of the run folder."""

import hashlib
from typing import ClassVar, Literal

from windlass.document import Document

CODE_FILE = "code.json"
DATA_FILE = "data.json"
InputName = Literal["request", "plan", "graph", "machine", "environment", "code", "data"]
"""What a run is made from. Each is a file of its folder, and has a fingerprint."""


class UntrackedFile(Document):
    """A text file that no commit holds."""

    name: str
    """Its path in the checkout, or the name of a model's file outside of any."""
    sha256: str
    """SHA-256 of the text, in which what looks like a secret is replaced."""
    text: str


class OmittedFile(Document):
    """A changed or untracked file whose content is not kept."""

    name: str
    reason: str
    """`looks like a secret`, `is no text` or `is too large`."""


class CodeTree(Document):
    """The code in one folder: a commit, and how the files differ from it."""

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset({"diff", "omitted"})

    commit: str | None = None
    """Git commit that is checked out; None outside of a checkout, or before its first commit."""
    digest: str | None = None
    """SHA-256 of all code, of an installed package that no checkout tracks."""
    diff: str = ""
    """Changes of tracked files as `git diff` prints them, cut after a mebibyte."""
    diff_sha256: str | None = None
    """SHA-256 of all of the diff; None without changes."""
    untracked: tuple[UntrackedFile, ...] = ()
    omitted: tuple[OmittedFile, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be recorded, and why, a sentence each."""


class CodeSnapshot(Document):
    """The code of a run."""

    windlass: CodeTree
    """The code of Windlass itself."""
    project: CodeTree | None = None
    """The user's: of the checkout with the model's file or the working directory. None if there is
    none, or if it is Windlass's own."""

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits for the fingerprints of both trees."""
        parts = (tree.fingerprint() if tree else "" for tree in (self.windlass, self.project))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


class DataSplit(Document):
    """The data on one side of the split into training and held-out data."""

    tokens: int
    documents: int
    """Documents of a text, or examples."""
    tokens_sha256: str
    """SHA-256 of all token ids, in order."""
    documents_sha256: str | None = None
    """SHA-256 of where each document begins and how it is named; None for examples."""


class DataManifest(Document):
    """The data of a run, by content: the same wherever the same text is prepared the same way."""

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset({"sources"})

    kind: Literal["text", "examples"]
    sources: tuple[str, ...] = ()
    """The sources as the request names them."""
    tokenizer_sha256: str | None = None
    """SHA-256 of the tokenizer's file; None for examples."""
    vocabulary: int
    train: DataSplit
    held_out: DataSplit
