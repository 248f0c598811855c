"""Shelves in memory and in files, each against plain bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.atomic_files import hash_file
from windlass.runtime.offload.backing_store import (
    BOUNCE_BYTES,
    BounceBuffer,
    BouncedFile,
    FileBackingStore,
    BackingStore,
    BackingStores,
)
from windlass.runtime.offload.direct_io import PAGE_BYTES, DirectFile, round_up_to_page, page_aligned_buffer

PAGES = 12
CPU = torch.device("cpu")

Make = Callable[[str, str], BackingStore]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Make]:
    """Makes a shelf of `PAGES` pages in a tier: `disk`, `host`, or a file behind a bounce."""
    shelves = BackingStores(tmp_path / "state", CPU)
    bounces = (BounceBuffer(CPU), BounceBuffer(CPU))

    def make(tier: str, name: str) -> BackingStore:
        if tier == "bounced":
            (tmp_path / "state").mkdir(exist_ok=True)
            made: BackingStore = FileBackingStore(tmp_path / "state" / name, PAGES * PAGE_BYTES, bounces)
        else:
            made = shelves.shelf(tier, name, PAGES * PAGE_BYTES)
            shelves.take()
        made.make()
        return made

    yield make
    shelves.close()
    for bounce in bounces:
        bounce.close()


def filled(value: int, pages: int = PAGES) -> Tensor:
    return page_aligned_buffer(pages * PAGE_BYTES).fill_(value)


def content(shelf: BackingStore) -> list[int]:
    """The first byte of each page."""
    memory = filled(255)
    with shelf.opened() as access:
        access.read(memory, 0)
    return memory[::PAGE_BYTES].tolist()


@pytest.mark.parametrize("tier", ["disk", "host", "bounced"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(
    writes=st.lists(
        st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES), st.integers(0, 254)),
        max_size=5,
    )
)
def test_a_shelf_reads_what_was_written_last(
    shelf: Make, tier: str, writes: list[tuple[int, int, int]]
):
    made, plain = shelf(tier, "one"), [0] * PAGES
    with made.opened(write=True) as access:
        access.write(filled(0), 0)
        for first, pages, value in writes:
            count = min(pages, PAGES - first)
            access.write(filled(value, count), first * PAGE_BYTES)
            plain[first : first + count] = [value] * count
    assert content(made) == plain


@pytest.mark.parametrize("tier", ["disk", "host", "bounced"])
@pytest.mark.parametrize("other", ["disk", "host"])
def test_what_was_saved_stays_when_the_shelf_changes_and_can_be_taken_over(
    shelf: Make, tmp_path: Path, tier: str, other: str
):
    made, to = shelf(tier, "one"), tmp_path / "saved"
    with made.changing() as (_, into):
        into.write(filled(1), 0)
    proof = made.save(to, lambda access: access.write(filled(7, 1), 0))
    for value in (2, 3):
        with made.changing() as (_, into):
            into.write(filled(value), 0)
    assert content(made) == [3] * PAGES
    assert (proof().bytes, proof().sha256) == (PAGES * PAGE_BYTES, hash_file(to))
    heir = shelf(other, "heir")
    heir.adopt(to)
    assert content(heir) == [7, *[1] * (PAGES - 1)]
    with heir.changing() as (_, into):
        into.write(filled(4), 0)
    assert proof().sha256 == hash_file(to)


def test_a_file_that_is_too_short_is_not_taken_over(shelf: Make, tmp_path: Path):
    (tmp_path / "short").write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(OSError, match=f"ends at {PAGE} bytes, {PAGES * PAGE} were due"):
        shelf("host", "one").adopt(tmp_path / "short")


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, BOUNCE_BYTES, 2 * BOUNCE_BYTES + 5])
def test_memory_of_any_size_comes_through_a_bounce_as_it_was(tmp_path: Path, nbytes: int):
    bounces = (BounceBuffer(CPU), BounceBuffer(CPU))
    memory = (torch.arange(nbytes, dtype=torch.int64) % 251).to(torch.uint8)
    again = torch.zeros_like(memory)
    with DirectFile(tmp_path / "file", write=True) as file:
        file.resize(PAGE_BYTES + round_up_to_page(nbytes))
        through = BouncedFile(file, *bounces)
        through.write(memory, PAGE_BYTES)
        through.read(again, PAGE_BYTES)
    assert torch.equal(again, memory)
    for bounce in bounces:
        bounce.close()
