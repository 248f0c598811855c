"""Defaults of batch, sequence, steps and learning rate by model and machine."""

import pytest

from factories import catalog_graph, tiny_graph, tiny_machine
from windlass.planner.defaults import resolve_defaults, smaller_batches
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.request import Request

CPU, CPUS = tiny_machine(), tiny_machine(devices=64)
GPUS = CPUS.model_copy(update={"device": CPUS.device.model_copy(update={"kind": "cuda"})})


def graph(parameters: float, sequence: int | None = 2048) -> Graph:
    """A graph of about this many parameters, all of them in its embedding and its head."""
    return tiny_graph(
        layers=0, width=1000, vocabulary=int(parameters) // 1000, max_sequence=sequence, tied=True
    )


def chosen(model: Graph, machine: Machine, *overrides: str) -> tuple[int, int, int]:
    train = resolve_defaults(Request.resolve(overrides=overrides), model, machine)[0].train
    return train.batch, train.sequence, train.steps


def test_a_small_model_takes_16_sequences_and_400_steps_on_any_machine():
    assert chosen(graph(3e6, 256), CPU) == chosen(graph(3e6, 256), GPUS) == (16, 256, 400)


@pytest.mark.parametrize(
    ("parameters", "batch"), [(125e6, 256), (1.3e9, 512), (13e9, 1024), (175e9, 1536)]
)
def test_a_model_on_gpus_takes_the_batch_of_the_gpt_3_of_its_size(parameters: float, batch: int):
    assert chosen(graph(parameters), GPUS)[:2] == (batch, 2048)


def test_a_run_on_gpus_sees_twenty_tokens_a_parameter():
    model = graph(125e6)
    batch, sequence, steps = chosen(model, GPUS)
    assert 0 <= steps * batch * sequence - 20 * model.parameter_count < batch * sequence


def test_a_large_model_on_a_cpu_takes_a_step_of_4096_tokens():
    assert chosen(graph(124e6, 1024), CPU) == (4, 1024, 100)
    assert chosen(graph(124e6, 1024), CPU, "train.sequence=128") == (32, 128, 100)


@pytest.mark.parametrize(("longest", "sequence"), [(64, 64), (131_072, 8192), (None, 8192)])
def test_the_sequence_is_the_longest_that_the_model_takes_within_a_limit(
    longest: int | None, sequence: int
):
    assert chosen(graph(125e6, longest), GPUS)[1] == sequence


@pytest.mark.parametrize(
    ("pins", "batch"),
    [
        (("parallel.data=3",), 15), (("batch.micro=32",), 32),
        (("batch.micro=3", "batch.accumulation=2"), 6), (("sharding.parameters=6",), 12),
    ],
)  # fmt: skip
def test_the_batch_is_one_that_the_pins_divide_and_the_reason_says_so(
    pins: tuple[str, ...], batch: int
):
    resolved, defaults = resolve_defaults(Request.resolve(overrides=pins), graph(3e6), CPU)
    assert resolved.train.batch == batch
    assert str(pins[-1].split("=")[1]) in next(
        default.reason for default in defaults if default.key == "train.batch"
    )


def test_what_a_request_names_stays_and_has_no_reason():
    asked = ("batch=7", "sequence=99", "steps=5", "learning_rate=0.5")
    request = Request.resolve(overrides=[f"train.{each}" for each in asked])
    resolved, defaults = resolve_defaults(request, graph(3e6), CPU)
    assert (resolved.train.batch, resolved.train.sequence, resolved.train.steps) == (7, 99, 5)
    assert resolved.train.learning_rate == 0.5
    assert defaults == ()


def test_a_resolved_request_keeps_all_else_and_resolves_to_itself():
    request = Request.resolve(overrides=("memory=2GiB", "train.clip=inf", "recompute=full"))
    resolved, _ = resolve_defaults(request, graph(3e6), CPU)
    content = resolved.model_dump(mode="json")
    chosen = {
        "batch": 16, "sequence": 1024, "steps": 400, "learning_rate": 1e-3, "betas": [0.9, 0.95],
        "schedule": "cosine", "relative_step": False,
        "momentum": 0.9, "nesterov": False, "epsilon": 1e-8, "weight_decay": 0.1,
    }  # fmt: skip
    assert content == request.model_dump(mode="json") | {
        "train": request.model_dump(mode="json")["train"] | chosen
    }
    again = Request.model_validate(content)
    assert resolve_defaults(again, graph(175e9), GPUS)[0] == resolved


def test_smaller_batches_are_quarters_down_to_one_unless_the_batch_is_named():
    assert smaller_batches(Request(), 1536) == (384, 96, 24, 6, 1)
    assert smaller_batches(Request(), 2) == (1,)
    assert smaller_batches(Request.resolve(overrides=("train.batch=16",)), 16) == ()


def test_a_smaller_default_batch_is_one_that_the_pins_divide():
    request = Request.resolve(overrides=("parallel.data=4",))
    resolved, defaults = resolve_defaults(request, graph(13e9), GPUS, most_sequences=6)
    assert resolved.train.batch == 4
    assert "the usual 1024 does not fit" in {default.reason for default in defaults}


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(3e6, 1e-3), (125e6, 6e-4), (350e6, 3e-4), (760e6, 2.5e-4), (1.3e9, 2e-4), (2.7e9, 1.6e-4),
     (6.7e9, 1.2e-4), (13e9, 1e-4), (175e9, 6e-5)],
)  # fmt: skip
def test_the_learning_rate_is_the_published_one_of_the_model_of_its_size(
    parameters: float, rate: float
):
    request = resolve_defaults(Request(), graph(parameters), GPUS)[0]
    assert request.train.learning_rate == rate


def test_an_encoder_takes_the_learning_rate_of_bert():
    bert = catalog_graph("bert-base")
    assert resolve_defaults(Request(), bert, GPUS)[0].train.learning_rate == 1e-4


def test_a_sliding_window_makes_no_encoder():
    gemma = catalog_graph("gemma3-270m")
    assert resolve_defaults(Request(), gemma, GPUS)[0].train.learning_rate == 3e-4


def test_pretrained_weights_take_the_rate_and_the_batch_of_fine_tuning():
    for name, rate in (("hf:folder", 2e-5), ("hf:folder/config.json", 1.2e-4)):
        request = Request.resolve(overrides=(f'model.name="{name}"',))
        train = resolve_defaults(request, graph(6.7e9), GPUS)[0].train
        assert train.learning_rate == rate
        assert (train.batch == 64) == (name == "hf:folder")

    adapters = Request.resolve(overrides=('model.name="hf:folder"', "lora.rank=8"))
    assert resolve_defaults(adapters, graph(6.7e9), GPUS)[0].train.learning_rate == 2e-4
