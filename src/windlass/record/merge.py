"""Merges stores of runs: a union by content, in whatever order, after whatever interruption.

A file of a record has one writer, who only appends to it (journals) or never changes it again. So
a store lacks a file, has a beginning of it, or has all of it, and any copy may be damaged: of
journals the records count that either copy has. Two files of one name that differ otherwise come
from a run that went on at two sites, and both are kept.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.atomic_files import hash_file
from windlass.errors import RecordError
from windlass.record.annotations import is_change, kept_change_name
from windlass.record.stores import (
    JOURNAL_NAME,
    FolderStore,
    RunNotCopiedError,
    Store,
    checkpoint_of,
    free_journal_name,
    is_annotation,
    journal_copies,
    kept_name,
    read_errors,
    size_problem,
)
from windlass.tracking import (
    ID_FILE,
    JournalUnion,
    journal_writer_id,
    parse_journal,
    unite_journals,
)
from windlass.units import format_bytes

Progress = Callable[[str, int, int | None], None]
"""Takes what is done, how much of it, and of how much."""


@dataclass(kw_only=True)
class MergeReport:
    """What a merge did."""

    runs: int = 0
    """Runs of the sources, each counted once."""
    new_runs: int = 0
    """Those that the target did not have."""
    copied_files: int = 0
    copied_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    """A sentence each: runs that went on at two sites, damaged copies, names left out."""

    def lines(self, target: str) -> Iterator[str]:
        """What was copied to a place, and the warnings."""
        new = f"{self.new_runs} of them new" if self.new_runs else "none of them new"
        copied = f"{self.copied_files} files, {format_bytes(self.copied_bytes)}"
        yield f"{self.runs} runs, {new} in `{target}`; copied {copied}"
        yield from (f"warning: {warning}" for warning in self.warnings)


def merge_folders(
    sources: Sequence[Path],
    target: Path,
    *,
    checkpoints: bool = False,
    progress: Progress | None = None,
) -> MergeReport:
    """Copies into `target` whatever it lacks of the runs in `sources`.

    Done again it copies nothing; interrupted, it goes on. The order of sources has no influence.

    Args:
        target: a folder of runs, or a new one.

    Raises:
        RecordError: a source is no folder of runs, or was written by a newer Windlass.
    """
    missing = [str(source) for source in sources if not source.is_dir()]
    if missing:
        raise RecordError(f"no folder of runs: {', '.join(f'`{name}`' for name in missing)}")
    stores = [FolderStore(source) for source in sources]
    into = FolderStore(target)
    report = MergeReport(warnings=[warning for store in stores for warning in store.warnings])
    for store in stores:
        copy_runs(store, into, report, checkpoints=checkpoints, progress=progress)
    report.runs = len({run_id for store in stores for run_id in store.runs()})
    return report


def copy_runs(
    source: FolderStore,
    target: Store,
    report: MergeReport,
    *,
    checkpoints: bool = False,
    progress: Progress | None = None,
) -> None:
    """Copies whatever `target` lacks of the runs of `source`, and adds it up in `report`.

    What is wrong with one run is a warning, and the others come over.

    Raises:
        RecordError: a copy is not what was read.
    """
    runs, present = source.runs(), target.runs()
    for done, (run_id, folder) in enumerate(sorted(runs.items()), start=1):
        is_new = run_id not in present
        if is_new:
            target.add_run(run_id, folder)
        try:
            _copy_run(_Copy(source, target, run_id, report), checkpoints=checkpoints)
            report.new_runs += is_new
        except RunNotCopiedError as error:
            report.warnings.append(f"run {run_id} did not come over: {error}")
        if progress is not None:
            progress(f"runs of {source.label}", done, len(runs))


def _copy_run(copy: "_Copy", *, checkpoints: bool) -> None:
    """Copies a run; its id file comes last, so that a part of it does not count as a run."""
    offered = copy.source.files(copy.run_id, checkpoints=checkpoints)
    present = dict(copy.target.files(copy.run_id, checkpoints=checkpoints))
    kept = copy.other_checkpoints(offered, present)
    for name in sorted(offered, key=lambda name: (name == ID_FILE, name)):
        if problem := size_problem(name, offered[name]):
            copy.warn(name, problem)
        elif JOURNAL_NAME.fullmatch(name):
            copy.journal(name, offered[name], present)
        elif checkpoint := checkpoint_of(name):
            if name not in present and checkpoint not in kept:
                copy.large_file(name)
        elif "+" not in name and name not in present:
            copy.put(name, copy.source.read(copy.run_id, name))
        elif name != ID_FILE and (name not in present or copy.digests_differ(name)):
            (copy.annotation if is_annotation(name) else copy.variant)(name)


@dataclass(frozen=True, kw_only=False)
class _Copy:
    """One run on its way from one store to another."""

    source: FolderStore
    target: Store
    run_id: str
    report: MergeReport

    def put(self, name: str, content: bytes) -> None:
        """Writes a file and reads it back."""
        self.target.write(self.run_id, name, content)
        self._count(name, hashlib.sha256(content).hexdigest(), len(content))

    def large_file(self, name: str) -> None:
        """Copies a file part by part, and reads it back."""
        file = self.source.path(self.run_id, name)
        with read_errors(file):  # a run that goes on keeps its last checkpoints alone
            self.target.copy(self.run_id, name, file)
            self._count(name, hash_file(file), file.stat().st_size)

    def other_checkpoints(self, offered: Iterable[str], present: Collection[str]) -> set[str]:
        """Checkpoints of which the target has others; files of two sites do not fit together."""
        shared = [name for name in offered if name in present and checkpoint_of(name)]
        others = {name.rpartition("/")[0] for name in shared if self.digests_differ(name)}
        self.report.warnings += (
            f"run {self.run_id} has two checkpoints `{name}` that differ; that of "
            f"`{self.target.label}` stays there"
            for name in sorted(others)
        )
        return others

    def digests_differ(self, name: str) -> bool:
        source, target = (s.digest(self.run_id, name) for s in (self.source, self.target))
        return source != target

    def journal(self, name: str, size: int, present: dict[str, int]) -> None:
        """Brings the target's copy of a journal up to the source's, or adds it."""
        if present.get(name) == size and not self.digests_differ(name):
            return
        theirs = self.source.read(self.run_id, name, size)
        if journal_writer_id(theirs) is None:
            if theirs:
                self.warn(name, "holds no record that can be read, and is left out")
            return
        copies = journal_copies(name, present)
        for own in copies:
            ours = self.target.read(self.run_id, own)
            union = unite_journals(ours, theirs)
            if union is not None:
                self._take(own, ours, theirs, union)
                return
        own = free_journal_name(name, theirs, present)
        if copies:
            self._warn_of_two_sites(name)
        self.put(own, theirs)
        present[own] = size

    def annotation(self, name: str) -> None:
        """Takes a change of tags or notes that differs from the target's, as far as it is whole."""
        theirs, ours = (store.read(self.run_id, name) for store in (self.source, self.target))
        if not is_change(theirs):
            self.warn(name, f"is damaged; the copy in `{self.target.label}` stays")
        elif not is_change(ours):
            self.put(name, theirs)
        else:  # somebody has edited one: both count, and have the same names in every order
            first, second = sorted(
                (ours, theirs), key=lambda change: hashlib.sha256(change).digest()
            )
            if (own := kept_change_name(second)) not in self.target.files(self.run_id):
                self.put(own, second)
            if first != ours:
                self.put(name, first)

    def variant(self, name: str) -> None:
        """Keeps a document that differs from the target's beside it.

        The one that the last attempt sealed has the name, and others have their hash behind it.
        """
        plain = name.partition("+")[0]
        theirs = self.source.read(self.run_id, name)
        digest = hashlib.sha256(theirs).hexdigest()
        kept, is_kept = kept_name(self.target, self.run_id, plain, digest)
        if is_kept:
            return
        if plain not in self.target.files(self.run_id):
            self.put(kept, theirs)
            return
        current = self.target.read(self.run_id, plain)
        ours = hashlib.sha256(current).hexdigest()
        if digest == ours:
            return
        if _rank_of(digest, plain, self) > _rank_of(ours, plain, self):
            other, is_kept = kept_name(self.target, self.run_id, plain, ours)
            if not is_kept:
                self.put(other, current)
            self.put(plain, theirs)
        else:
            self.put(kept, theirs)
        self.report.warnings.append(
            f"run {self.run_id} has two files `{plain}` that differ; both are kept"
        )

    def _take(self, name: str, ours: bytes, theirs: bytes, union: JournalUnion) -> None:
        """Puts what unites two copies of a journal in place of the target's."""
        if union.content == ours:
            if union.theirs_is_worse:
                self.warn(name, f"is damaged; the copy in `{self.target.label}` has all of it")
            return
        if self.target.is_busy(self.run_id):
            self.report.warnings.append(
                f"run {self.run_id} is being written in `{self.target.label}`; merge again later"
            )
            return
        self.put(name, union.content)
        if union.content != theirs:
            self.warn(
                name,
                f"lacks records that the copy in `{self.target.label}` has, and has others; that "
                "copy has those of both now",
            )

    def _count(self, name: str, digest: str, nbytes: int) -> None:
        """Counts a file that was written, once what lies there is what was read."""
        if self.target.digest(self.run_id, name) != digest:
            raise RecordError(f"`{name}` of run {self.run_id} changed on its way; merge again")
        self.report.copied_files += 1
        self.report.copied_bytes += nbytes

    def warn(self, name: str, what: str) -> None:
        """Adds a sentence about a file of the source."""
        self.report.warnings.append(
            f"`{name}` of run {self.run_id} in `{self.source.label}` {what}"
        )

    def _warn_of_two_sites(self, name: str) -> None:
        match = JOURNAL_NAME.fullmatch(name)
        warning = (
            f"run {self.run_id} went on at two sites: attempt {match[2] if match else '?'} exists "
            "twice, and both are kept"
        )
        if warning not in self.report.warnings:
            self.report.warnings.append(warning)


def _rank_of(digest: str, name: str, copy: _Copy) -> tuple[tuple[int, float], str]:
    """Orders the variants of a document: by the last attempt that sealed it, then by hash."""
    latest = (0, 0.0)
    for store in (copy.source, copy.target):
        for journal in store.files(copy.run_id):
            match = JOURNAL_NAME.fullmatch(journal)
            if match and match[1] == "0":
                for event in parse_journal(store.read(copy.run_id, journal)).events:
                    if event.name == "seal" and event.fields.get("files", {}).get(name) == digest:
                        latest = max(latest, (int(match[2]), event.time))
    return latest, digest
