"""Software stacks as files: each constant has a meaning, a unit and a source."""

from pathlib import Path

import pytest

from windlass.errors import InputErrors, StackError
from windlass.stacks import load_stack, stack_constants, stack_names


@pytest.mark.parametrize("name", stack_names())
def test_each_constant_of_a_stack_has_a_meaning_a_value_with_unit_and_a_source(name: str) -> None:
    stack = load_stack(name)

    constants = stack_constants(stack)

    assert stack.name == name
    assert len(constants) > 20
    for each in constants:
        assert each.meaning.endswith("."), each.key
        assert each.text, each.key
        if name != "windlass" and not each.key.startswith("can."):
            assert each.source.how != "unverified", f"{name}: {each.key} = {each.text}"


def test_an_unknown_stack_names_the_nearest_and_the_way_to_write_one() -> None:
    with pytest.raises(StackError, match=r"unknown stack `megatron-cor`; did you mean `megatron-"):
        load_stack("megatron-cor")


def test_a_file_of_ones_own_is_a_stack(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nabout = "ours"\nattention = "flash3"\nlaunch_seconds = "9 us"\n'
    )

    stack = load_stack(str(path))

    assert (stack.name, stack.attention, stack.launch_seconds) == ("mine", "flash3", 9e-6)


def test_all_that_is_wrong_in_a_stack_file_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(
        'name = "wrong"\nabout = "nonsense"\nattention = "flash9"\nlaunch_seconds = -1.0\n'
        "products = nan\ntraffic = 1e30\nlaunches = 3\n"
    )

    with pytest.raises(InputErrors) as error:
        load_stack(str(path))

    for key in ("attention", "launch_seconds", "products", "traffic", "launches"):
        assert any(key in line for line in error.value.messages), key
