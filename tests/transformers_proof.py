"""Trains tiny models of transformers beside a plain loop; writes the table of the docs.

    python tests/transformers_proof.py [MODEL_TYPE ...] [--write]

`--write` puts the rows into `docs/guide/hugging-face.md`, in place of those that it has.
"""

import argparse
import math
import re
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

import windlass
from tiny_transformers import ARCHITECTURES, tiny_folder, tiny_input
from windlass.errors import WindlassError

Way = Literal["memory", "stages", "tensor"]
WAYS: dict[Way, tuple[str, ...]] = {
    "memory": ("phases=1", "precision=float32"),
    "stages": ("parallel.pipeline=2", "batch.micro=2", "precision=float32"),
    "tensor": ("parallel.tensor=2", "precision=float64"),
}
"""Settings of each way to train."""
STEPS, RATE = 20, 3e-3
SETTINGS = (
    f"train.steps={STEPS}", "train.batch=4", "compile=false", "train.evaluate_sequences=1",
    "data.held_out=0.2", "train.clip=inf", "train.optimizer=adamw",
    f"train.learning_rate={RATE}", "train.schedule=constant", "train.warmup=0",
    "train.weight_decay=0", "train.betas=[0.9,0.95]", "train.epsilon=1e-8",
)  # fmt: skip
IN_FLOAT64 = ("nemotron",)
"""Its squared ReLU lets float32's rounding grow to 2.3e-5 in 20 steps, and float64's to 5e-14."""
DOCS = Path(__file__).parent.parent / "docs" / "guide" / "hugging-face.md"


def prove(model_type: str, way: Way, folder: Path) -> dict[str, float]:
    """Trains a model for 20 steps on all of its examples at once, so that their order is nothing.

    Returns:
        Largest relative differences: of losses from those of a plain loop, of weights from its
        weights where both are in float64, of an exported folder's logits from its logits, and of
        losses in two phases from those in memory, which is to be zero.

    Raises:
        WindlassError: it cannot be trained so.
    """
    name, model = tiny_folder(model_type, folder / "model")
    x = tiny_input(model, 5)
    inputs, targets = (
        (x, torch.arange(5)) if x.is_floating_point() else (x[:, :30], x[:, 1:31])
    )  # fmt: skip
    data = list(zip(inputs, targets, strict=True))
    precise = ("precision=float64",) if model_type in IN_FLOAT64 else ()
    settings = (*SETTINGS, *WAYS[way], *precise)

    def losses(*overrides: str) -> list[float]:
        run = windlass.train(name, *settings, *overrides, data=data, root=folder / "runs")
        return [step.loss for step in run]

    ours = losses()
    wide = settings[-1] == "precision=float64"
    model = model.to(torch.float64 if wide else torch.float32)
    result = {"losses": difference(ours, plain_losses(model, inputs[:4], targets[:4]))}
    if way != "stages":
        windlass.export("last", to=f"hf:{folder / 'out'}", root=folder / "runs")
        exported = type(model).from_pretrained(folder / "out", dtype=model.dtype).eval()
        with torch.no_grad():
            result["logits"] = apart(logits(exported, inputs), logits(model.eval(), inputs))
        if way == "tensor":
            own = exported.state_dict()
            pairs = [(own[key], value) for key, value in model.state_dict().items()]
            result["weights"] = max(apart(one, other) for one, other in pairs)
    if way == "memory":
        result["phases"] = difference(losses("phases=2"), ours)
    return result


def plain_losses(model: Any, inputs: Tensor, targets: Tensor) -> list[float]:  # noqa: ANN401
    """The losses of a plain loop, which changes the model."""
    inputs = inputs.to(model.dtype) if inputs.is_floating_point() else inputs
    if model.dtype == torch.float64 and any(hasattr(m, "has_gate") for m in model.modules()):
        # Grouped products of torch have no float64.
        model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(
        model.train().parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0
    )
    losses = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(logits(model, inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def logits(model: Any, x: Tensor) -> Tensor:  # noqa: ANN401  of transformers
    """What a model of transformers gives."""
    x = x.to(model.dtype) if x.is_floating_point() else x
    return model(**{model.main_input_name: x}).logits


def difference(ours: list[float], plain: list[float]) -> float:
    """The largest relative difference; infinite if one list is shorter."""
    if len(ours) != len(plain):
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in zip(ours, plain, strict=True))


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference as a share of the largest number."""
    largest = float(theirs.abs().max()) or 1.0
    return float((ours.double() - theirs.double()).abs().max()) / largest


def cells(model_type: str, way: Way) -> list[str]:
    """What the table says of one way to train a model."""
    columns = {"memory": ("losses", "logits", "phases"), "stages": ("losses",)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = prove(model_type, way, Path(folder))
        except WindlassError as error:
            reason = re.search(r"because (.*?);|(takes images)", str(error))
            refused = (reason[1] or reason[2]) if reason else str(error).replace(folder, "")
            return [f"refused: {refused}", *columns.get(way, ("weights",))[1:]]
    if "phases" in result and not result["phases"]:
        return [f"{result['losses']:.1e}", f"{result['logits']:.1e}", "same bits"]
    return [f"{result[column]:.1e}" for column in columns.get(way, ("weights",))]


def main() -> None:
    """Prints a row for each model, and writes it into the docs if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_types", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for model_type in options.model_types:
        columns = [each for way in WAYS for each in cells(model_type, way)]
        row = f"| `{model_type}` | {' | '.join(columns)} |"
        print(row, flush=True)
        if options.write:
            lines = DOCS.read_text(encoding="utf-8").splitlines()
            lines = [row if line.startswith(f"| `{model_type}` |") else line for line in lines]
            DOCS.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
