"""Lists are written alike in all commands."""

from collections.abc import Callable
from typing import Any

import pytest
from cyclopts import App

from windlass.api.compare import batch, compare_machines as compare
from windlass.api.exchange import mirror
from windlass.api.layer_dataflow import dataflow
from windlass.api.smallest_machine import smallest_machines as smallest_machine
from windlass.cli.commands.record.runs import list_runs
from windlass.cli.commands.record.sweep import run_sweep

LISTS: list[tuple[Callable[..., None], str, list[str]]] = [
    (batch, "--sizes", ["8", "16"]),
    (compare, "--on", ["h100", "v100"]),
    (dataflow, "--on", ["h100", "v100"]),
    (dataflow, "--sparsity", ["0.5", "0.75"]),
    (list_runs, "--columns", ["name", "train.learning_rate"]),
    (mirror, "--to", ["csv:a.csv", "parquet:b.parquet"]),
    (run_sweep, "--objective", ["loss", "max:seconds"]),
    (smallest_machine, "--on", ["dgx-h100", "cs-2"]),
]


def given(command: Callable[..., None], *words: str) -> Any:  # noqa: ANN401  any list
    """What a command line gives for the option that its first word names."""
    app = App()
    app.default(command)
    _, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    return bound.arguments[words[0].removeprefix("--")]


@pytest.mark.parametrize(("command", "option", "words"), LISTS)
def test_a_list_has_commas_or_its_option_is_repeated(
    command: Callable[..., None], option: str, words: list[str]
):
    first, second = words
    with_comma = given(command, option, f"{first},{second}")
    assert len(with_comma) == 2
    assert with_comma == given(command, option, first, option, second)


@pytest.mark.parametrize(
    ("command", "option", "words"), [one for one in LISTS if one[1] in ("--on", "--sizes")]
)
def test_lists_that_took_spaces_take_them_still(
    command: Callable[..., None], option: str, words: list[str]
):
    assert given(command, option, *words) == given(command, option, ",".join(words))


def test_an_override_with_a_list_behind_a_list_stays_whole():
    assert given(compare, "--on", "h100", "train.tasks=a,b") == ("h100", "train.tasks=a,b")


def test_a_word_that_is_no_number_is_named_with_its_option():
    with pytest.raises(Exception, match=r"--sizes 8,x.*is no list of whole numbers"):
        given(batch, "--sizes", "8,x")
