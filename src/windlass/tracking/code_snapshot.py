"""The code of a run: commit, changes and untracked text of the user's project and of Windlass.

Nothing here may fail a run: what git does not answer in time becomes a note.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from windlass.atomic_files import source_digest
from windlass.schema import CodeSnapshot, CodeTree, OmittedFile, UntrackedFile
from windlass.tracking.redaction import is_secret_name, without_secrets

_PACKAGE = Path(__file__).parents[1]
_KEPT_BYTES = 2**20
"""Most bytes of a diff, and of all untracked files together."""
_KEPT_FILES = 500
_SECONDS = 0.5
"""Time that git has for both trees together."""
_SECRET, _NO_TEXT, _TOO_LARGE = "looks like a secret", "is no text", "is too large"
_OUTPUT = re.compile(
    r"(^|/)(__pycache__|wandb|mlruns|lightning_logs|\.ipynb_checkpoints)/"
    r"|(^|/)\.catalog\.sqlite[^/]*$|\.(log|out|err|pyc|tmp)$"
)
"""What programs write beside code; it is no input of a run."""
_RUN_JOURNAL = re.compile(r"(.*)/journal/[0-9]+\.[0-9]+(\+[0-9a-f]{8,64})?\.j", re.DOTALL)
"""The journal of a run whose folder lies in a checkout."""


def snapshot_code(
    model_file: Path | None = None,
    *,
    folder: Path | None = None,
    seconds: float = _SECONDS,
    kept_bytes: int = _KEPT_BYTES,
) -> CodeSnapshot:
    """The code of a run that starts now.

    Args:
        model_file: the user's file that builds the model; None if the model is of the catalog.
        folder: a folder in the user's project; None takes that of the model's file, or the
            working directory.
        seconds: time for git; what it has not answered by then becomes a note.
        kept_bytes: most bytes of a diff, and of all untracked files of a tree together.
    """
    git = _Git(shutil.which("git"), time.monotonic() + seconds, seconds, kept_bytes)
    place = folder or (model_file.absolute().parent if model_file else Path.cwd())
    own, users = git.checkout(_PACKAGE), git.checkout(place)
    if own and not git.tracks(_PACKAGE / "__init__.py"):
        own = None  # an installed package that merely lies below somebody's checkout
    windlass = git.tree(own, _PACKAGE) if own else CodeTree(digest=source_digest("."))
    project = None
    if users is not None and (own is None or users.root != own.root or model_file is not None):
        project = git.tree(users, users.root)
    if model_file is not None and (users is None or project is None):
        project = CodeTree(untracked=tuple(_model_file(model_file, kept_bytes)))
    return CodeSnapshot(windlass=windlass, project=project)


class _Checkout(NamedTuple):
    root: Path
    commit: str | None


class _Change(NamedTuple):
    name: str
    is_tracked: bool


class _Git:
    """Asks git about checkouts until its time is up."""

    def __init__(self, path: str | None, end: float, seconds: float, kept_bytes: int) -> None:
        self._path, self._end, self._seconds = path, end, seconds
        self._kept_bytes = kept_bytes

    def checkout(self, folder: Path) -> _Checkout | None:
        """The checkout that a folder lies in; None if it lies in none, or git is missing."""
        answer = self._ask(folder, "rev-parse", "--show-toplevel", "HEAD")
        if answer is not None:
            root, commit = os.fsdecode(answer).removesuffix("\n").rsplit("\n", 1)
            return _Checkout(Path(root), commit)
        answer = self._ask(folder, "rev-parse", "--show-toplevel")  # before the first commit
        return None if answer is None else _Checkout(Path(os.fsdecode(answer).strip("\n")), None)

    def tracks(self, file: Path) -> bool:
        """Whether a checkout tracks a file."""
        return self._ask(file.parent, "ls-files", "--error-unmatch", file.name) is not None

    def tree(self, checkout: _Checkout, scope: Path) -> CodeTree:
        """The code in a part of a checkout."""
        notes: list[str] = []
        status = self._ask(
            checkout.root, "status", "--porcelain=v1", "-z", "--untracked-files=all",
            "--no-renames", "--", str(scope),
        )  # fmt: skip
        if status is None:
            notes.append(f"changes are not recorded: {self._why()}")
        changes = _inputs(_changes(status or b""))
        secrets = [change for change in changes if is_secret_name(change.name)]
        diff, diff_sha256 = "", None
        if checkout.commit and any(c.is_tracked and c not in secrets for c in changes):
            excluded = (f":(top,exclude,literal){c.name}" for c in secrets if c.is_tracked)
            answer = self._ask(
                checkout.root, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color",
                "--no-renames", "--full-index", "--", str(scope), *excluded,
            )  # fmt: skip
            if answer is None:
                notes.append(f"the diff is not recorded: {self._why()}")
            else:
                diff, diff_sha256 = self._cut(answer), hashlib.sha256(answer).hexdigest()
        omitted = [OmittedFile(name=_printable(c.name), reason=_SECRET) for c in secrets]
        untracked = [
            c.name for c in changes if c not in secrets and not (c.is_tracked and checkout.commit)
        ]
        read = list(_read_files(checkout.root, untracked, self._kept_bytes, self._end))
        omitted += (item for item in read if isinstance(item, OmittedFile))
        if len(untracked) > _KEPT_FILES:
            notes.append(f"{len(untracked) - _KEPT_FILES} more untracked files are not recorded")
        return CodeTree(
            commit=checkout.commit,
            diff=diff,
            diff_sha256=diff_sha256,
            untracked=tuple(item for item in read if isinstance(item, UntrackedFile)),
            omitted=tuple(omitted),
            notes=tuple(notes),
        )

    def _cut(self, content: bytes) -> str:
        """As much of a diff as is kept, without secrets."""
        kept = without_secrets(content[: self._kept_bytes].decode(errors="replace"))
        more = len(content) - self._kept_bytes
        return kept if more <= 0 else f"{kept}\n[{more} more bytes are not kept]\n"

    def _why(self) -> str:
        if time.monotonic() < self._end:
            return "git failed"
        return f"git took longer than {self._seconds:g} s"

    def _ask(self, folder: Path, *words: str) -> bytes | None:
        """What a git command prints; None if it fails, is missing or takes too long."""
        if self._path is None or not folder.is_dir():
            return None
        command = [
            self._path, "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder),
            *words,
        ]  # fmt: skip
        # A file, as a pipe would have to hold a diff of any size in memory.
        with tempfile.TemporaryFile() as output:
            try:
                subprocess.run(  # noqa: S603  a list of our own words, no shell
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    timeout=max(0.01, self._end - time.monotonic()),
                    check=True,
                )
            except (OSError, ValueError, subprocess.SubprocessError):
                return None
            output.seek(0)
            return output.read(64 * self._kept_bytes)


def _changes(status: bytes) -> Iterator[_Change]:
    """The changed and untracked files in the output of `git status --porcelain -z`."""
    for entry in status.split(b"\0"):
        if len(entry) > 3:
            yield _Change(os.fsdecode(entry[3:]), not entry.startswith(b"??"))


def _inputs(changes: Iterable[_Change]) -> list[_Change]:
    """The changes that are inputs of a run: not what runs and other programs write."""
    found = list(changes)
    run_folders = {match[1] for change in found if (match := _RUN_JOURNAL.fullmatch(change.name))}
    return [
        change
        for change in found
        if not _OUTPUT.search(change.name)
        and run_folders.isdisjoint(map(str, Path(change.name).parents))
    ]


def _read_files(
    root: Path, names: Sequence[str], kept_bytes: int, end: float
) -> Iterator[UntrackedFile | OmittedFile]:
    """The text of some files, as far as it is text and there is room and time for it."""
    for name in sorted(names)[:_KEPT_FILES]:
        path, shown = root / name, _printable(name)
        try:
            size = path.lstat().st_size
            if not path.is_file() or path.is_symlink():
                continue
            if size > kept_bytes or time.monotonic() > end:
                yield OmittedFile(name=shown, reason=_TOO_LARGE)
                continue
            content = path.read_bytes()
            text = without_secrets(content.decode()) if b"\0" not in content else None
        except UnicodeDecodeError:
            text = None
        except OSError:
            continue
        if text is None:
            yield OmittedFile(name=shown, reason=_NO_TEXT)
            continue
        kept_bytes -= size
        yield UntrackedFile(name=shown, sha256=_sha256(text), text=text)


def _model_file(file: Path, kept_bytes: int) -> Iterator[UntrackedFile]:
    """The user's model file outside of any checkout."""
    for item in _read_files(file.absolute().parent, [file.name], kept_bytes, time.monotonic() + 1):
        if isinstance(item, UntrackedFile):
            yield item


def _printable(name: str) -> str:
    """A file's name as text that a JSON file can hold."""
    return name.encode(errors="backslashreplace").decode()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
