"""Files past the page cache."""

from pathlib import Path

import pytest
import torch

from windlass.runtime.offload.direct_io import PAGE_BYTES, DirectFile, round_up_to_page, page_aligned_buffer


def test_what_is_written_is_read_back(tmp_path: Path):
    memory, again = page_aligned_buffer(5 * PAGE_BYTES), page_aligned_buffer(5 * PAGE_BYTES)
    memory.copy_(torch.arange(5 * PAGE_BYTES) % 251)
    with DirectFile(tmp_path / "file", write=True) as file:
        file.resize(9 * PAGE_BYTES)
        file.write(memory, 2 * PAGE_BYTES)
        file.read(again, 2 * PAGE_BYTES)
    assert torch.equal(again, memory)


def test_memory_begins_at_a_page():
    assert all(page_aligned_buffer(PAGE_BYTES).data_ptr() % PAGE_BYTES == 0 for _ in range(10))


def test_a_file_that_ends_too_soon_is_an_error_that_says_where(tmp_path: Path):
    with DirectFile(tmp_path / "file", write=True) as file:
        file.resize(PAGE_BYTES)
        with pytest.raises(OSError, match="ends at 4096 bytes, 8192 from 0 on were due"):
            file.read(page_aligned_buffer(2 * PAGE_BYTES), 0)


def test_a_size_is_rounded_up_to_whole_pages():
    assert [round_up_to_page(n) for n in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [0, PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES]
