"""Whatever damage two copies of a run have, no way to bring them together loses a record."""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings, strategies as st
from served_record import KNOWN, TOKEN, Served, serve

from windlass.record import merge_folders, sync_runs
from windlass.tracking import (
    create_run_folder,
    journal_files,
    load_run,
    parse_journal,
    reopen_run_folder,
)

META = {"model": "tiny", "machine": "here", "steps": 30}
Records = set[tuple[int, int, str]]
Damage = tuple[str, int, int]
"""What happens to a file, where, in thousandths of it, and to how many bytes."""
DAMAGE = st.tuples(
    st.sampled_from(("flip", "zero", "junk", "cut out", "put in", "truncate")),
    st.integers(0, 1000),
    st.integers(1, 60),
)
COPY = st.lists(DAMAGE, max_size=4)
DOCUMENT = st.sampled_from((None, "a", "b", ""))


class Site(NamedTuple):
    """What one of the two sites has of the run."""

    first: list[Damage]
    second: list[Damage] | None
    """Its attempt 2; None without one."""
    went_on_here: bool
    """Whether attempt 2 is its own, or the one that both have."""
    document: str | None


ZEROS = Site([], [("zero", 198, 50)], went_on_here=False, document=None)
NAMES_ALONE = Site([], [("truncate", 287, 1), ("zero", 542, 46)], went_on_here=False, document=None)
"""Of whose second journal one record of names is left."""
SITE = st.builds(Site, COPY, st.none() | COPY, st.booleans(), DOCUMENT)


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """The id file and whole journals by name: attempt 1, and attempt 2 of three writers."""
    root = tmp_path_factory.mktemp("writers")
    files: dict[str, bytes] = {}
    with create_run_folder(root, "tiny", documents={}, meta=META) as run:
        add_rows(run, 1, 12)
    files["id"] = (run.path / "id").read_bytes()
    files["first"] = (run.path / "journal" / "0.1.j").read_bytes()
    for name in ("shared", "here", "there"):
        with reopen_run_folder(run.path, meta=META) as again:
            add_rows(again, 10, 18)
        files[name] = (run.path / "journal" / "0.2.j").read_bytes()
        (run.path / "journal" / "0.2.j").unlink()
    return files


def add_rows(run: object, first: int, last: int) -> None:
    journal = run.journal  # type: ignore[attr-defined]
    for step in range(first, last + 1):
        journal.append_row(step, {"loss": 1 / step, "seconds": 0.1})
        if step % 4 == 0:
            journal.append_row(step, {"sys.cpu": 0.5})
            journal.append_event("evaluation", {"step": step, "loss": 2 / step})


def damaged(content: bytes, damage: list[Damage]) -> bytes:
    made = bytearray(content)
    for kind, place, length in damage:
        at = place * len(made) // 1000
        noise = random.Random(place * 100 + length).randbytes(length)
        if kind == "flip" and at < len(made):
            made[at] ^= 1 << length % 8
        elif kind == "zero":
            made[at : at + length] = bytes(len(made[at : at + length]))
        elif kind == "junk":
            made[at : at + length] = noise[: len(made[at : at + length])]
        elif kind == "cut out":
            del made[at : at + length]
        elif kind == "put in":
            made[at:at] = noise
        elif kind == "truncate":
            del made[at:]
    return bytes(made)


def make_store(root: Path, site: Site, own: str, writers: Mapping[str, bytes]) -> None:
    folder = root / "run"
    (folder / "journal").mkdir(parents=True)
    (folder / "id").write_bytes(writers["id"])
    (folder / "journal" / "0.1.j").write_bytes(damaged(writers["first"], site.first))
    if site.second is not None:
        whole = writers[own if site.went_on_here else "shared"]
        (folder / "journal" / "0.2.j").write_bytes(damaged(whole, site.second))
    if site.document is not None:
        (folder / "plan.toml").write_text(site.document)


def records(root: Path) -> Records:
    """All rows and events that can be read, with their rank and attempt."""
    found: Records = set()
    for file in journal_files(root / "run"):
        journal = parse_journal(file.path.read_bytes())
        items = [
            *((row.step, row.time, dict(row.values)) for row in journal.rows),
            *((row.step, row.time, dict(row.values)) for row in journal.system_rows),
            *((event.name, event.time, dict(event.fields)) for event in journal.events),
        ]
        found |= {(file.rank, file.attempt, json.dumps(item, sort_keys=True)) for item in items}
    return found


def documents(root: Path) -> set[str]:
    return {path.read_text() for path in (root / "run").glob("plan.toml*")}


def merge(source: Path, served: Served) -> int:
    return merge_folders([source], served.root).copied_files


def sync(source: Path, served: Served) -> int:
    return sync_runs(source, served.url, token=TOKEN).copied_files


def put(source: Path, served: Served) -> int:
    """Sends each file as it is, as no client of ours does; returns how many were taken."""
    taken = 0
    run_id = (source / "run" / "id").read_text().split()[0]
    for file in sorted((source / "run").rglob("*")):
        if file.is_file():
            name = file.relative_to(source / "run").as_posix()
            path = f"/api/sync/runs/{run_id}/files/{name}?folder=run"
            status, _, said = served.send("PUT", path, file.read_bytes(), KNOWN)
            assert status in (204, 409), said
            taken += status == 204
    return taken


Way = Callable[[Path, Served], int]


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for all pairs, of which each has its run to itself."""
    with serve(tmp_path_factory.mktemp("center")) as served:
        yield served


def bring_together(
    root: Path, sites: tuple[Site, Site], writers: Mapping[str, bytes], center: Served, way: Way
) -> None:
    """Both stores are made, the second is added to the first, and nothing may be missing."""
    target, source = center.root, root / "source"
    try:
        make_store(target, sites[0], "here", writers)
        make_store(source, sites[1], "there", writers)
        expected, texts = records(target) | records(source), documents(target) | documents(source)
        way(source, center)
        assert records(target) >= expected
        assert documents(target) >= texts
        record = load_run(target / "run")
        attempts = [file.attempt for file in journal_files(target / "run")]
        for attempt in set(attempts):
            says_so = any(f"attempt {attempt} exists" in fault for fault in record.faults)
            assert says_so == (attempts.count(attempt) > 1)
        if way is not put:
            assert way(source, center) == 0
    finally:
        shutil.rmtree(root)
        shutil.rmtree(target / "run")


@pytest.mark.parametrize(("way", "pairs"), [(merge, 40), (sync, 12), (put, 12)])
def test_nothing_that_brings_stores_together_loses_a_record(
    tmp_path_factory: pytest.TempPathFactory,
    writers: Mapping[str, bytes],
    center: Served,
    way: Way,
    pairs: int,
) -> None:
    @settings(max_examples=pairs, deadline=None)
    @given(sites=st.tuples(SITE, SITE))
    @example(sites=(ZEROS, NAMES_ALONE))
    @example(sites=(NAMES_ALONE, ZEROS))
    def try_pairs(sites: tuple[Site, Site]) -> None:
        bring_together(tmp_path_factory.mktemp("pair"), sites, writers, center, way)

    try_pairs()


@pytest.mark.slow
@pytest.mark.parametrize("way", [merge, sync, put])
@settings(max_examples=2000, deadline=None)
@given(sites=st.tuples(SITE, SITE))
def test_none_of_two_thousand_pairs_loses_a_record(
    tmp_path_factory: pytest.TempPathFactory,
    writers: Mapping[str, bytes],
    center: Served,
    way: Way,
    sites: tuple[Site, Site],
) -> None:
    bring_together(tmp_path_factory.mktemp("pair"), sites, writers, center, way)
