"""Files read and written with direct I/O."""

from pathlib import Path

import pytest
import torch

from windlass.runtime.offload.direct_io import (
    PAGE_BYTES,
    DirectFile,
    page_aligned_buffer,
    round_up_to_page,
)


def test_what_is_written_is_read_back(tmp_path: Path):
    written, read = page_aligned_buffer(5 * PAGE_BYTES), page_aligned_buffer(5 * PAGE_BYTES)
    written.copy_(torch.arange(5 * PAGE_BYTES) % 251)
    with DirectFile(tmp_path / "file", write=True) as file:
        file.resize(9 * PAGE_BYTES)
        file.write(written, 2 * PAGE_BYTES)
        file.read(read, 2 * PAGE_BYTES)
    assert torch.equal(read, written)


def test_a_buffer_begins_at_a_page():
    for _ in range(10):
        assert page_aligned_buffer(PAGE_BYTES).data_ptr() % PAGE_BYTES == 0


def test_the_error_of_a_file_that_is_too_short_says_where_it_ends(tmp_path: Path):
    message = "ends at 4096 bytes, but 8192 bytes from 0 on were expected"
    with DirectFile(tmp_path / "file", write=True) as file:
        file.resize(PAGE_BYTES)
        with pytest.raises(OSError, match=message):
            file.read(page_aligned_buffer(2 * PAGE_BYTES), 0)


def test_a_size_is_rounded_up_to_full_pages():
    sizes = (0, 1, PAGE_BYTES, PAGE_BYTES + 1)
    expected = [0, PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES]
    assert [round_up_to_page(n) for n in sizes] == expected
