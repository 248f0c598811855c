"""Runs that train a part of the weights: in memory, sharded, resumed, and from a parent."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import windlass
from command_line import TINY
from factories import tiny_machine
from windlass.errors import WindlassError
from windlass.hardware.local_machine import save_local_machine, system_fingerprint
from windlass.models.layer_stack import materialize_layer
from windlass.program.lowering.lower import lower
from windlass.schema import CHECKPOINT_FOLDER
from windlass.verify.check import Verifier, verification

MODEL, *OVERRIDES = TINY
LORA = ("lora.rank=2", "train.steps=4", "train.save_every=2", "train.learning_rate=0.01")


def train(home: Path, *overrides: str) -> windlass.Run:
    words = (*OVERRIDES, f"data.source={home / 'text'}", *LORA, *overrides)
    return windlass.train(MODEL, *words, root=home / "runs")


def tensors(run: windlass.Run) -> dict[str, torch.Tensor]:
    newest = max((run.folder / CHECKPOINT_FOLDER).iterdir())
    return {key: t for file in newest.glob("layer-*") for key, t in load_file(file).items()}


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_frozen_weight_keeps_its_bits_and_has_no_state(home: Path, precision: str) -> None:
    run = train(home, f"precision={precision}")
    list(run)

    saved = tensors(run)
    stack = run.planned.objects.stack(run.planned.request.model_identity, seed=0)
    trained = {key.removeprefix("moment1/") for key in saved if key.startswith("moment1/")}
    for index, name in enumerate(stack.names):
        layer = materialize_layer(stack, index, seed=run.planned.request.train.seed, device="cpu")
        for path, weight in layer.named_parameters():
            full_name = f"{name}.{path}"
            assert (full_name in trained) == weight.requires_grad
            if full_name in stack.tied_weights or weight.requires_grad:
                continue
            value = saved[f"weight/{full_name}"]
            assert value.dtype == getattr(torch, precision)
            assert torch.equal(value, weight.detach().to(value.dtype))
    assert len(trained) == 8
    assert all(saved[f"weight/{name}"].dtype == torch.float32 for name in trained)
    assert any(saved[f"weight/{name}"].any() for name in trained if name.endswith("lora_b"))


def test_a_run_with_adapters_that_is_abandoned_resumes_to_the_same_numbers(home: Path) -> None:
    whole, left = train(home), train(home)
    list(whole)
    steps = iter(left)
    for step in steps:
        if step.step == 3:
            break
    del steps
    list(windlass.resume(left.folder, root=home / "runs"))

    assert [s.loss for s in windlass.load(left.folder).steps] == [
        s.loss for s in windlass.load(whole.folder).steps
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_a_plan_with_adapters_has_no_gradient_or_state_of_the_base() -> None:
    pins = ("precision=bfloat16", "compile=false", "recompute=none", "batch.micro=2")
    sizes = ("model.layers=6", "model.width=256", "model.heads=4")
    full, lora = (windlass.plan(MODEL, *OVERRIDES, *sizes, *pins, *words) for words in ((), LORA))

    count = lora.graph.parameter_count - lora.graph.trained_count
    assert count == full.graph.parameter_count
    spared = full.prediction.peaks[0].peak_bytes - lora.prediction.peaks[0].peak_bytes
    # Master, two moments and the gradient that is summed take 4 bytes each. The adapters' own state
    # and activations take a little of that.
    assert 15.9 * count < spared < 16.2 * count


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (('train.frozen=["embedding.*"]',), "`train.frozen` with `lora`"),
        (("sparsity.level=0.5",), "`lora` with `sparsity`"),
        (('lora.targets=["q_proj"]',), "no linear layer"),
    ],
)
def test_what_adapters_cannot_do_yet_is_refused_in_a_sentence(
    home: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(WindlassError, match=message):
        train(home, *words)


@pytest.fixture
def with_host(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, on a machine with host memory to offload to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    machine = tiny_machine(memory="8 GiB", host="8 GiB")
    system = {"name": "here", "system": system_fingerprint()}
    save_local_machine(home / "cache" / "windlass", machine.model_copy(update=system))
    return home


@pytest.mark.slow
def test_a_run_with_adapters_in_phases_has_the_bits_of_one_in_memory(with_host: Path) -> None:
    words = ("model.layers=2", "precision=bfloat16", "compile=false")
    whole = train(with_host, *words, "phases=1")
    streamed = train(with_host, *words, "phases=2")
    list(whole)
    steps = iter(streamed)
    for step in steps:
        if step.step == 3:
            break
    del steps  # it goes on from the checkpoint of step 2
    list(windlass.resume(streamed.folder, root=with_host / "runs"))

    actual, expected = tensors(streamed), tensors(whole)
    assert all(torch.equal(actual[key], value) for key, value in expected.items())


FRONT = 'train.frozen=["embedding.*", "block0.*", "block1.*", "head.*"]'
"""The head is tied to the embedding, so that all but the last two blocks are frozen."""


def frozen_front(home: Path, *overrides: str) -> windlass.Run:
    words = (
        *OVERRIDES, "model.layers=4", f"data.source={home / 'text'}", "train.steps=3",
        "precision=float32", "compile=false", FRONT, *overrides,
    )  # fmt: skip
    return windlass.train(MODEL, *words, root=home / "runs")


def test_no_backward_pass_comes_down_to_frozen_layers_at_the_front(with_host: Path) -> None:
    whole, streamed = frozen_front(with_host, "phases=1"), frozen_front(with_host, "phases=3")
    (program,) = lower(whole.planned.plan, whole.planned.graph)
    backward = {i.layer for i in program.instructions if i.kind in ("backward", "recompute")}
    assert backward == {3, 4, 5}
    list(whole)
    list(streamed)

    actual, expected = tensors(streamed), tensors(whole)
    assert all(torch.equal(actual[key], value) for key, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [
        ("parallel.pipeline=3", "train.batch=6", "batch.micro=2"),
        ("parallel.pipeline=2", "parallel.schedule=zero-bubble"),
        ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"),
        ("parallel.tensor=2",),
        ("phases=3",),
        ("compile=true", "phases=3"),
        ("phases=3", "parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"),
        ("phases=3", "parallel.pipeline=2"),
    ],
)
def test_a_plan_with_a_frozen_front_equals_a_single_device(
    with_host: Path, pins: tuple[str, ...]
) -> None:
    words = (*OVERRIDES, "model.layers=4", f"data.source={with_host / 'text'}", FRONT, *pins)
    planned = verification(windlass.plan(MODEL, *words), steps=2)
    result = Verifier(planned, with_host / "runs").verify()
    assert result.passed, result.first_mismatch


@pytest.mark.slow
def test_a_run_with_adapters_goes_on_with_two_four_and_one_ranks(home: Path) -> None:
    words = (
        "model.layers=2", "train.steps=6", "train.batch=4", "precision=float32", "compile=false",
    )  # fmt: skip
    whole, cut = train(home, *words), train(home, *words, "parallel.data=2")
    list(whole)
    plans = (
        ("parallel.tensor=2", "parallel.pipeline=2", "parallel.data=1"),
        ("parallel.tensor=1", "parallel.pipeline=1", "parallel.data=1"),
    )
    run = cut
    for last, plan in zip((3, 5), plans, strict=True):
        steps = iter(run)
        for step in steps:
            if step.step == last:
                break
        del steps
        run = windlass.resume(cut.folder, *plan, root=home / "runs")
    list(run)

    losses, expected = (
        [step.loss for step in windlass.load(each.folder).steps] for each in (cut, whole)
    )
    # Sums of float32 in another order over six steps.
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [
        ("parallel.tensor=2", "parallel.pipeline=2"),
        ("parallel.tensor=2", "lora.dropout=0.2"),
        ("phases=2", "lora.dropout=0.2"),
        ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"),
        ("parallel.data=2", "sharding.optimizer=2"),
        ("parallel.pipeline=2", "parallel.schedule=zero-bubble"),
        ("phases=2",),
        ("phases=2", "parallel.data=2"),
        ("phases=2", "parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"),
        ("phases=2", "parallel.tensor=2", "precision=bfloat16"),
        ("phases=2", "parallel.pipeline=2", "train.clip=inf"),
        ("offload.optimizer=host", "parallel.data=2", "sharding.optimizer=2"),
        ("parallel.tensor=2", 'lora.targets=["projection", "attention.*"]', "lora.dropout=0.2"),
    ],
)
def test_a_plan_with_adapters_equals_a_single_device(
    with_host: Path, pins: tuple[str, ...]
) -> None:
    words = (*OVERRIDES, "model.layers=2", f"data.source={with_host / 'text'}", *LORA, *pins)
    planned = verification(windlass.plan(MODEL, *words), steps=2)
    result = Verifier(planned, with_host / "runs").verify()
    assert result.passed, result.first_mismatch
