"""Code that torch.compile has cached is used only as it was written."""

import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from windlass.torch_ext.compile_cache import (
    remove_changed_files,
    remove_torn_libraries,
    seal_files,
)


def test_a_file_that_has_changed_since_it_was_sealed_is_removed(tmp_path: Path):
    for name in ("ab/one.py", "ab/two.so", "ab/two.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"code of " + name.encode())
    seal_files(tmp_path)
    assert remove_changed_files(tmp_path) == ()

    (tmp_path / "ab/two.so").write_bytes(b"Code of ab/two.so")
    (tmp_path / "ab/two.lock").write_bytes(b"taken")
    (tmp_path / "ab/one.py").touch()  # its content is the same

    assert remove_changed_files(tmp_path) == ("ab/two.so",)
    assert sorted(path.name for path in (tmp_path / "ab").iterdir()) == ["one.py", "two.lock"]


def test_new_files_are_sealed_and_a_damaged_list_of_seals_removes_nothing(tmp_path: Path):
    (tmp_path / "one.py").write_text("one")
    seal_files(tmp_path)
    (tmp_path / "two.py").write_text("two")
    seal_files(tmp_path)
    (tmp_path / "two.py").write_text("TWO")
    assert remove_changed_files(tmp_path) == ("two.py",)
    (tmp_path / "one.py").write_text("ONE")
    (tmp_path / "windlass-seals.json").write_text("{")
    assert remove_changed_files(tmp_path) == ()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 0.999])
def test_a_library_whose_linker_was_killed_is_removed_and_a_whole_one_stays(
    tmp_path: Path, share: float
):
    whole = next(Path(sysconfig.get_path("platlib")).glob("numpy/_core/*.so"))
    shutil.copy(whole, tmp_path / "whole.so")
    size = round(share * whole.stat().st_size)
    (tmp_path / "torn.so").write_bytes(whole.read_bytes()[:size])
    assert remove_torn_libraries(tmp_path, link_seconds=0.0) == ("torn.so",)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.so"]


def test_a_library_that_another_process_still_writes_stays(tmp_path: Path):
    torn = tmp_path / "torn.so"
    torn.touch()
    with ThreadPoolExecutor() as pool:
        removed = pool.submit(remove_torn_libraries, tmp_path, link_seconds=60.0)
        shutil.copy(next(Path(sysconfig.get_path("platlib")).glob("numpy/_core/*.so")), torn)
        assert removed.result() == ()
    assert torn.exists()
