"""Backing stores in host memory and in files, each against plain bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from windlass.atomic_files import hash_file
from windlass.runtime.offload.backing_store import (
    BOUNCE_BYTES,
    BackingStore,
    BackingStores,
    BounceBuffer,
    BouncedFile,
    FileBackingStore,
)
from windlass.runtime.offload.direct_io import (
    PAGE_BYTES,
    DirectFile,
    page_aligned_buffer,
    round_up_to_page,
)
from windlass.torch_ext import device_for

PAGES = 12
CPU = device_for("cpu")

CreateStore = Callable[[str, str], BackingStore]


@pytest.fixture
def create_store(tmp_path: Path) -> Iterator[CreateStore]:
    """Creates a store of `PAGES` pages: on `disk`, in `host` memory, or a `bounced` file."""
    stores = BackingStores(tmp_path / "state", CPU)
    bounce = (BounceBuffer(CPU), BounceBuffer(CPU))

    def create(tier: str, name: str) -> BackingStore:
        if tier == "bounced":
            (tmp_path / "state").mkdir(exist_ok=True)
            path = tmp_path / "state" / name
            store: BackingStore = FileBackingStore(path, PAGES * PAGE_BYTES, bounce)
        else:
            store = stores.create(tier, name, PAGES * PAGE_BYTES)
            stores.allocate_host_memory()
        store.allocate()
        return store

    yield create
    stores.close()
    for buffer in bounce:
        buffer.close()


def filled(value: int, pages: int = PAGES) -> Tensor:
    return page_aligned_buffer(pages * PAGE_BYTES).fill_(value)


def first_bytes(store: BackingStore) -> list[int]:
    """The first byte of each page."""
    memory = filled(255)
    with store.open() as handle:
        handle.read(memory, 0)
    return memory[::PAGE_BYTES].tolist()


@pytest.mark.parametrize("tier", ["disk", "host", "bounced"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(
    writes=st.lists(
        st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES), st.integers(0, 254)),
        max_size=5,
    )
)
def test_a_store_reads_what_was_written_last(
    create_store: CreateStore, tier: str, writes: list[tuple[int, int, int]]
):
    store, expected = create_store(tier, "one"), [0] * PAGES
    with store.open(write=True) as handle:
        handle.write(filled(0), 0)
        for first, pages, value in writes:
            count = min(pages, PAGES - first)
            handle.write(filled(value, count), first * PAGE_BYTES)
            expected[first : first + count] = [value] * count
    assert first_bytes(store) == expected


@pytest.mark.parametrize("tier", ["disk", "host", "bounced"])
@pytest.mark.parametrize("other", ["disk", "host"])
def test_a_saved_file_does_not_change_with_the_store_and_can_be_adopted(
    create_store: CreateStore, tmp_path: Path, tier: str, other: str
):
    store, saved = create_store(tier, "one"), tmp_path / "saved"
    with store.open_for_rewrite() as (_, target):
        target.write(filled(1), 0)
    checksum = store.save_as(saved, lambda handle: handle.write(filled(7, 1), 0))
    for value in (2, 3):
        with store.open_for_rewrite() as (_, target):
            target.write(filled(value), 0)
    assert first_bytes(store) == [3] * PAGES
    assert (checksum().bytes, checksum().sha256) == (PAGES * PAGE_BYTES, hash_file(saved))
    adopter = create_store(other, "adopter")
    adopter.adopt_file(saved)
    assert first_bytes(adopter) == [7, *[1] * (PAGES - 1)]
    with adopter.open_for_rewrite() as (_, target):
        target.write(filled(4), 0)
    assert checksum().sha256 == hash_file(saved)


def test_a_file_that_is_too_short_is_not_adopted(create_store: CreateStore, tmp_path: Path):
    (tmp_path / "short").write_bytes(bytes(PAGE_BYTES))
    message = f"ends at {PAGE_BYTES} bytes, but {PAGES * PAGE_BYTES} bytes were expected"
    with pytest.raises(OSError, match=message):
        create_store("host", "one").adopt_file(tmp_path / "short")


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, BOUNCE_BYTES, 2 * BOUNCE_BYTES + 5])
def test_a_buffer_of_any_size_passes_unchanged_through_bounce_buffers(tmp_path: Path, nbytes: int):
    bounce = (BounceBuffer(CPU), BounceBuffer(CPU))
    memory = (torch.arange(nbytes, dtype=torch.int64) % 251).to(torch.uint8)
    result = torch.zeros_like(memory)
    with DirectFile(tmp_path / "file", write=True) as file:
        file.resize(PAGE_BYTES + round_up_to_page(nbytes))
        bounced = BouncedFile(file, *bounce)
        bounced.write(memory, PAGE_BYTES)
        bounced.read(result, PAGE_BYTES)
    assert torch.equal(result, memory)
    for buffer in bounce:
        buffer.close()
