"""Defaults of fine-tuning: passes over the data, a batch that they fill, a sequence they need."""

import pytest

from factories import tiny_graph, tiny_machine
from windlass.planner.defaults import resolve_defaults
from windlass.schema.data_request import DataSize
from windlass.schema.request import Request

GRAPH = tiny_graph(layers=0, width=1000, vocabulary=200_000, max_sequence=4096, tied=True)
CPU = tiny_machine()
GPUS = tiny_machine(devices=64)
ADAPTERS = ("lora.rank=8",)


def chosen(
    data: DataSize | None, *overrides: str, devices: int = 1
) -> tuple[tuple[int, int, int], dict[str, str]]:
    """Batch, sequence and steps, and why so."""
    machine = CPU if devices == 1 else GPUS
    request = Request.resolve(overrides=overrides)
    resolved, defaults = resolve_defaults(request, GRAPH, machine, data=data)
    train = resolved.train
    reasons = {default.key: default.reason for default in defaults}
    return (train.batch, train.sequence, train.steps), reasons


def test_the_steps_of_fine_tuning_are_three_passes_over_a_small_data_set():
    sizes, reasons = chosen(DataSize(tokens=60_000, rows=1000, sequence=72), *ADAPTERS)
    assert sizes == (16, 72, 188)
    assert reasons["train.steps"] == "3 epochs of 1,000 rows, as Alpaca had of 52,002 examples"
    assert "QLoRA" in reasons["train.batch"]
    assert "QLoRA" in reasons["train.learning_rate"]
    assert reasons["train.sequence"] == "the longest conversation needs 72"


def test_a_large_data_set_is_passed_over_once():
    sizes, _ = chosen(DataSize(tokens=10**8, rows=200_000, sequence=72), *ADAPTERS)
    assert sizes == (16, 72, 12_500)


@pytest.mark.parametrize(("rows", "batch", "steps"), [(7, 1, 21), (100, 4, 75), (320, 16, 60)])
def test_a_batch_is_so_small_that_the_data_make_twenty_steps(rows: int, batch: int, steps: int):
    sizes, _ = chosen(DataSize(rows=rows, sequence=72), *ADAPTERS)
    assert (sizes[0], sizes[2]) == (batch, steps)


def test_every_device_has_a_row_where_the_data_are_enough():
    assert chosen(DataSize(rows=10_000, sequence=72), *ADAPTERS, devices=64)[0][0] == 64
    assert chosen(DataSize(rows=400, sequence=72), *ADAPTERS, devices=64)[0][0] == 16


def test_a_text_is_passed_over_in_rows_of_its_sequence():
    sizes, reasons = chosen(DataSize(tokens=64_000, sequence=1000), *ADAPTERS)
    assert sizes == (2, 1000, 96)
    assert reasons["train.sequence"] == "the text is no longer than 1000"


def test_text_that_nobody_named_is_passed_over_once_at_most():
    unnamed = DataSize(tokens=20_480, is_named=False)
    assert chosen(unnamed, *ADAPTERS)[0] == (4, 1024, 5)
    assert chosen(None, *ADAPTERS)[0] == (4, 1024, 100)


def test_conversations_for_weights_that_are_drawn_decide_about_the_sequence_alone():
    sizes, reasons = chosen(DataSize(rows=1000, sequence=64, by_epochs=False))
    assert sizes == (64, 64, 100)
    assert "epoch" not in reasons["train.steps"]


def test_what_is_named_stays_beside_data():
    pins = ("train.batch=5", "train.sequence=99", "train.steps=7", *ADAPTERS)
    assert chosen(DataSize(rows=1000, sequence=64), *pins)[0] == (5, 99, 7)
