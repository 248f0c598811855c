"""Code of another version to run: a commit with the changes of a run, in a clone in the cache.

A clone shares the objects of the checkout that it is of, whose repository stays as it is: a git
worktree would be listed there for as long as the cache keeps it.

`python -m windlass.judging.differences.code_versions SPEC.json` is what `git bisect run` calls: it
takes a short run with the code that is checked out, and exits with 0 if it is good, 1 if bad, 125
if it fails.
"""

import dataclasses
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from windlass.atomic_files import atomic_write, cache_folder
from windlass.child_processes import module_command
from windlass.errors import RecordError, RunBroken
from windlass.jobs import RUNS, load
from windlass.judging.differences.short_run import ShortRun, metric_value, nearer_side, run_shortly
from windlass.schema import CODE_FILE, CodeSnapshot, CodeTree
from windlass.tracking import RunRecord, is_from_this_host, kept_variables

_GIT_SECONDS = 60.0
_EXIT_CODES = {"good": 0, "bad": 1, "unresolved": 125}
"""Exit codes for `git bisect run`, which leaves a commit out at the last one."""
_FIRST_BAD = re.compile(r"^([0-9a-f]{40}) is the first bad commit", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_PACKAGE = Path(__file__).parents[2]


class CodeVersion(NamedTuple):
    """The code of one side of a bisection."""

    commit: str
    is_clean: bool
    """Whether the run had no uncommitted changes."""
    checkout: Path
    """The checkout that both versions come from."""
    folder: Path
    """The clone that holds it."""
    is_windlass: bool
    """Whether it is the code of Windlass, and not of the user's project."""

    @property
    def source(self) -> Path | None:
        """What to put on Python's path; None for a project, which is the working directory."""
        return self.folder / "src" if self.is_windlass else None

    @property
    def directory(self) -> Path | None:
        """The working directory of a run with it; None leaves it as it is."""
        return None if self.is_windlass else self.folder


def code_versions(
    good: Path, bad: Path
) -> tuple[tuple[CodeVersion, CodeVersion] | None, tuple[str, ...]]:
    """The code of two runs, checked out beside each other, and why it cannot be, if it cannot.

    None without a reason if the code is the same.
    """
    try:
        snapshots = [CodeSnapshot.load(folder / CODE_FILE) for folder in (good, bad)]
    except Exception:  # noqa: BLE001  an old run did not record its code, or the file is damaged
        return None, ("the code of the runs is not recorded",)
    for is_windlass, trees in (
        (True, [snapshot.windlass for snapshot in snapshots]),
        (False, [snapshot.project for snapshot in snapshots]),
    ):
        first, second = trees
        if first == second:
            continue
        if first is None or second is None or not (first.commit and second.commit):
            return None, ("the code differs and lies in no git checkout, so it was not switched",)
        try:
            versions = [_check_out(tree, is_windlass=is_windlass) for tree in (first, second)]
        except RecordError as error:
            return None, (str(error),)
        return (versions[0], versions[1]), ()
    return None, ()


def find_first_bad_commit(
    versions: tuple[CodeVersion, CodeVersion],
    run: ShortRun,
    metric: str,
    values: tuple[float, float],
) -> str | None:
    """The first commit with which a run is bad, by `git bisect run`; None if it cannot be told.

    Args:
        metric: `loss` or `seconds`.
        values: the metric of the good and of the bad run.
    """
    good, bad = versions
    if not (good.is_clean and bad.is_clean):
        return None
    folder = bad.folder.with_name(f"{bad.folder.name}-bisect")
    _clone(bad.checkout, folder, bad.commit)
    spec = folder.with_suffix(".json")
    fields = dataclasses.asdict(run) | {
        "source": folder / "src" if bad.is_windlass else None,
        "directory": None if bad.is_windlass else folder,
    }
    content = {"run": fields, "metric": metric, "values": values}
    atomic_write(spec, json.dumps(content, default=str))
    try:
        _git(folder, "bisect", "start", bad.commit, good.commit)
        command = module_command("windlass.judging.differences.code_versions", str(spec))
        output = _git(folder, "bisect", "run", *command, seconds=None)
    except RecordError:
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        spec.unlink(missing_ok=True)
    found = _FIRST_BAD.search(output)
    return found[1][:12] if found else None


def _check_out(tree: CodeTree, *, is_windlass: bool) -> CodeVersion:
    """A clone at a commit with recorded changes; made once and kept in the cache."""
    if not _COMMIT.fullmatch(tree.commit or ""):
        raise RecordError("the recorded commit is none, so that the code was not switched")
    place = _PACKAGE if is_windlass else Path.cwd()
    checkout = Path(_git(place, "rev-parse", "--show-toplevel").strip())
    commit = tree.commit or ""
    changes = hashlib.sha256(tree.to_json().encode()).hexdigest()[:8]
    folder = cache_folder() / "code" / f"{commit[:12]}-{changes}"
    if not (folder / ".git").exists():
        try:
            _clone(checkout, folder, commit)
            if tree.diff:
                _git(folder, "apply", "--whitespace=nowarn", "-", text=tree.diff)
            for file in tree.untracked:
                target, clone = (folder / file.name).resolve(), folder.resolve()
                # What lies in `.git` is run by git.
                inside = target.relative_to(clone).parts if target.is_relative_to(clone) else ()
                if inside and inside[0].lower() != ".git":
                    atomic_write(target, file.text)
        except RecordError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    clean = not tree.diff and not tree.untracked
    return CodeVersion(commit, clean, checkout, folder, is_windlass)


def _clone(checkout: Path, folder: Path, commit: str) -> None:
    """Puts a clone of a checkout, at one of its commits, in place of a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    _git(checkout, "clone", "--quiet", "--shared", "--no-checkout", str(checkout), str(folder))
    _git(folder, "checkout", "--quiet", "--detach", commit)


def _git(
    folder: Path, *words: str, text: str | None = None, seconds: float | None = _GIT_SECONDS
) -> str:
    """What a git command prints."""
    git = shutil.which("git")
    if git is None:
        raise RecordError("the code differs and git is missing, so it was not switched")
    try:
        answer = subprocess.run(  # noqa: S603  a list of words, no shell
            [git, "-C", str(folder), *words],
            capture_output=True, text=True, check=True, timeout=seconds, input=text,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()
        reason = said[-1] if said else "git failed"
        raise RecordError(f"the code cannot be switched: {reason}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise RecordError(f"the code cannot be switched: {error}") from None
    return answer.stdout


def _judge_checked_out(arguments: Sequence[str]) -> int:
    """The exit code for `git bisect run`."""
    content = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    fields = content["run"]
    paths = {name: fields[name] and Path(fields[name])
             for name in ("request", "plan", "source", "directory")}  # fmt: skip
    checkout = paths["directory"] or paths["source"].parent
    commit = _git(checkout, "rev-parse", "--short=12", "HEAD").strip()
    folder = Path(f"{fields['folder']}-{commit}")
    run = ShortRun(**(fields | paths | {"folder": folder}))
    try:
        if not folder.exists():
            run_shortly(run)
        value = metric_value(folder, content["metric"], run.steps)
    except RunBroken:
        value = math.nan
    return _EXIT_CODES[nearer_side(value, *content["values"])]


if __name__ == "__main__":
    sys.exit(_judge_checked_out(sys.argv[1:]))


def recorded_code(*names: str | Path, root: Path | str = RUNS) -> tuple[str, ...]:
    """What `bisect` would run and set of runs that were not made here, line by line.

    Args:
        names: the runs.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or more than one.
    """
    records = [load(name, root=root) for name in names]
    return tuple(line for record in records if _is_foreign(record) for line in _lines(record))


def require_code_of_this_host(*records: RunRecord) -> None:
    """Refuses runs whose code, request and variables somebody else may have written.

    Raises:
        RecordError: one was not made by this user on this machine, or has changed since.
    """
    for record in records:
        if _is_foreign(record):
            raise RecordError(
                f"run `{record.folder.name}` was not made by you on this machine, or has changed "
                "since, and bisect would run its model, its code and its settings here; "
                "`--run-recorded-code` shows them and then does so"
            )


def _is_foreign(record: RunRecord) -> bool:
    return not is_from_this_host(record.folder, record.id, record.events)


def _lines(record: RunRecord) -> Iterator[str]:
    yield f"run {record.folder.name}: model `{record.model}`"
    if record.environment is not None:
        for name, value in kept_variables(record.environment.variables).items():
            yield f"variable {name}={value}"
    trees = (record.code.windlass, record.code.project) if record.code else ()
    for title, tree in zip(("Windlass", "the project"), trees, strict=False):
        if tree is not None:
            yield from _tree_lines(title, tree)


def _tree_lines(title: str, tree: CodeTree) -> Iterator[str]:
    yield f"code of {title}: commit {tree.commit or 'unknown'}"
    yield from tree.diff.splitlines()
    for file in tree.untracked:
        yield f"file {file.name}:"
        yield from (f"+{line}" for line in file.text.splitlines())
