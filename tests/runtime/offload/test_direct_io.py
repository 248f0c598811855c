"""Files past the page cache."""

from pathlib import Path

import pytest
import torch

from windlass.runtime.offload.direct_io import PAGE, DirectFile, aligned, page_memory


def test_what_is_written_is_read_back(tmp_path: Path):
    memory, again = page_memory(5 * PAGE), page_memory(5 * PAGE)
    memory.copy_(torch.arange(5 * PAGE) % 251)
    with DirectFile(tmp_path / "file", write=True) as file:
        file.resize(9 * PAGE)
        file.write(memory, 2 * PAGE)
        file.read(again, 2 * PAGE)
    assert torch.equal(again, memory)


def test_memory_begins_at_a_page():
    assert all(page_memory(PAGE).data_ptr() % PAGE == 0 for _ in range(10))


def test_a_file_that_ends_too_soon_is_an_error_that_says_where(tmp_path: Path):
    with DirectFile(tmp_path / "file", write=True) as file:
        file.resize(PAGE)
        with pytest.raises(OSError, match="ends at 4096 bytes, 8192 from 0 on were due"):
            file.read(page_memory(2 * PAGE), 0)


def test_a_size_is_rounded_up_to_whole_pages():
    assert [aligned(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
