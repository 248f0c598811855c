"""Code that torch.compile has cached is used only as it was written."""

from pathlib import Path

from windlass.torch_ext.compile_cache import remove_changed_files, seal_files


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
