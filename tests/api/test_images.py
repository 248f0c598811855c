"""Training on images and on numbers, from Python."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import windlass
from windlass.errors import ModelError, PlanError

SETTINGS = (
    "train.steps=2", "train.batch=8", "batch.micro=4", "precision=float32", "compile=false",
    "train.evaluate_sequences=3", "data.held_out=0.25", "train.clip=inf",
)  # fmt: skip
ROUNDING = 1e-5
"""Relative difference that sums of micro-batches leave in float32."""

Train = Callable[..., windlass.Run]


@pytest.fixture
def train(home: Path) -> Train:
    """Trains with a few small steps."""

    def start(model: object, *overrides: str, **more: object) -> windlass.Run:
        return windlass.train(model, *SETTINGS, *overrides, root=home / "runs", **more)  # type: ignore[arg-type]

    return start


def convolutions(outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, outputs)
    )


def pairs(kind: str) -> list[tuple[Tensor, object]]:
    """Eleven images of 1 x 4 x 4 of which eight are trained on, with a class or numbers each."""
    torch.manual_seed(1)
    targets = {"class": [i % 3 for i in range(11)], "numbers": list(torch.randn(11, 3))}[kind]
    return list(zip(torch.randn(11, 1, 4, 4), targets, strict=True))


@pytest.mark.parametrize("kind", ["class", "numbers"])
def test_the_losses_are_those_of_a_plain_loop_over_all_examples(train: Train, kind: str):
    data, plain = pairs(kind), convolutions(3)
    images = torch.stack([image for image, _ in data])
    targets = (
        torch.tensor([target for _, target in data])
        if kind == "class"
        else torch.stack([target for _, target in data])  # type: ignore[misc]
    )
    loss = nn.functional.cross_entropy if kind == "class" else nn.functional.mse_loss

    run = train(convolutions(3), data=data)
    steps = list(run)

    # A batch is all of them, so their order does not matter.
    expected = loss(plain(images[:8]), targets[:8]).item()
    assert steps[0].loss == pytest.approx(expected, rel=ROUNDING)
    assert steps[1].loss < steps[0].loss
    assert steps[0].tokens == 8
    assert run.planned.plan.batch.sequence == 1
    assert (steps[-1].held_out_accuracy is None) == (kind == "numbers")


def test_an_example_whose_numbers_are_not_known_does_not_count(train: Train):
    data = pairs("numbers")
    unknown = [*data]
    unknown[2] = (data[2][0], torch.tensor([1.0, float("nan"), 2.0]))
    plain = convolutions(3)
    images = torch.stack([image for image, _ in data])
    targets = torch.stack([target for _, target in data])  # type: ignore[misc]
    kept = [index for index in range(8) if index != 2]

    steps = list(train(convolutions(3), data=unknown))

    expected = nn.functional.mse_loss(plain(images[kept]), targets[kept]).item()
    assert steps[0].loss == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.slow
def test_data_of_another_shape_than_the_model_takes_are_refused(train: Train):
    with pytest.raises(PlanError, match=r"inputs of \[1, 4, 4\], and `vit-tiny` takes \[1, 8, 8\]"):
        list(train("vit-tiny", "model.layers=1", data=pairs("class")))


@pytest.mark.slow
def test_digits_are_learned_and_their_accuracy_is_kept(train: Train):
    run = train("vit-tiny", "model.layers=1", "model.width=16", "model.heads=2")

    *_, last = run

    assert last.held_out_accuracy is not None
    assert windlass.load(run.folder).steps[-1].held_out_accuracy == last.held_out_accuracy
    assert "images/s" in str(run.planned.prediction._facts())
    assert np.isfinite(last.loss)


@pytest.mark.slow
def test_ranks_do_not_share_batch_norms(train: Train):
    with pytest.raises(PlanError, match="keeps running statistics"):
        train("resnet-tiny", "parallel.data=2", "batch.micro=4")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vit-tiny", "resnet-18"])
def test_a_trained_model_of_images_goes_to_transformers_and_back(
    train: Train, home: Path, model: str
):
    from transformers import AutoModelForImageClassification

    words = ("model.input_shape=[3,8,8]", "model.classes=10")
    run = train(model, *words)
    list(run)
    folder = home / "out"
    windlass.export(run.folder, to=f"hf:{folder}", root=home / "runs")

    theirs, report = AutoModelForImageClassification.from_pretrained(
        folder, output_loading_info=True
    )
    again = train(
        f"hf:{folder}", "model.input_shape=[3,8,8]" if model == "resnet-18" else "train.seed=0"
    )
    list(again)

    assert not any(report.values())
    before = theirs.state_dict()
    windlass.export(again.folder, to=f"hf:{home / 'back'}", root=home / "runs")
    after = AutoModelForImageClassification.from_pretrained(home / "back").state_dict()
    assert before.keys() == after.keys()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert any("weight" in name for name in moved)
    assert (model == "resnet-18") == any("running_mean" in name for name in moved)


@pytest.mark.slow
def test_pixels_are_scaled_as_the_folder_of_a_model_says(train: Train, home: Path):
    words = ("model.layers=1", "model.width=16", "model.heads=2")
    run = train("vit-tiny", *words)
    list(run)
    folder = home / "out"
    windlass.export(run.folder, to=f"hf:{folder}", root=home / "runs")
    processor = folder / "preprocessor_config.json"
    processor.write_text('{"size": 8, "image_mean": [0.25], "image_std": [0.5]}')

    planned = windlass.plan(f"hf:{folder}")

    assert (planned.request.data.image_mean, planned.request.data.image_std) == ((0.25,), (0.5,))
    processor.write_text('{"image_mean": [0.25, 0.3], "image_std": [0.5, 0.5]}')
    with pytest.raises(ModelError, match="has 2 numbers as `image_mean`, and the model takes"):
        windlass.plan(f"hf:{folder}")


NUMBERS = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU()), nn.Linear(8, 8), nn.Linear(8, 3)
    )
"""
RANK_DIGITS = 1e-5
"""Relative: float32 sums of eight examples, in two parts."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        ("parallel.data=2",),
        ("parallel.pipeline=2",),
        ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"),
    ],
)
def test_numbers_are_learned_by_several_processes_as_by_one(
    plan: tuple[str, ...], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "several_numbers.py").write_text(NUMBERS)
    draws = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(1, 4, 4, generator=draws), torch.randn(3, generator=draws)) for _ in range(24)
    ]
    data[5][1][1] = torch.nan  # an example that does not count
    model = (
        "model.input_shape=[1,4,4]",
        "model.predicts=numbers",
        *SETTINGS,
        "train.batch=8",
    )
    runs = [
        [
            step.loss
            for step in windlass.train(
                "several_numbers.py:build", *model, *keys, data=data, root=home / "runs"
            )
        ]
        for keys in ((), plan)
    ]
    assert runs[1] == pytest.approx(runs[0], rel=RANK_DIGITS)
