"""Recipes of trainings as data: each is a file in `trainings/` with requests in order."""

import tomllib
from functools import cache
from importlib.resources import files
from math import log2
from typing import Any

from pydantic import Field

from windlass.document import Document
from windlass.errors import RequestError, did_you_mean
from windlass.experiments.recipes.recipe_plan import request_of, settings_of
from windlass.models import is_huggingface, model_config
from windlass.schema import Request

_MOST_DEPTH = 512
CONVERSATIONS = "FOLDER/conversations.jsonl"
"""The `data.source` of a recipe that writes conversations into the folder in which it runs."""


class RecipePart(Document):
    """One run of a training recipe."""

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keys of a request, beside those that all parts share."""
    parent: str | None = None
    """The part from whose last checkpoint it starts; None starts from weights of the seed."""
    base: str | None = None
    """The part whose model it fine-tunes, as a Hugging Face folder; None fine-tunes none."""


class RecipeTarget(Document):
    """What the last part of a recipe has to reach; None does not count."""

    held_out_loss: float | None = None
    """Most nats a token, or an image."""
    accuracy: float | None = None
    """Least share of questions that are answered right, or of held-out images whose class is."""

    def __str__(self) -> str:
        loss, accuracy = self.held_out_loss, self.accuracy
        words = [] if loss is None else [f"held-out loss at most {loss:g} nats"]
        words += [] if accuracy is None else [f"accuracy at least {accuracy:g}"]
        return " and ".join(words)


class TrainingScale(Document):
    """A training recipe at one size."""

    settings: dict[str, Any]
    """Keys of a request that all parts share."""
    parts: tuple[RecipePart, ...]
    target: RecipeTarget | None = None
    """None where nothing was measured."""
    depth: int | None = None
    """The dial from which shape, batch, rate and steps follow; None where settings name them."""
    tokens_per_weight: float = 20
    """How long a recipe with a depth trains."""
    needs_weights: bool = False
    """Whether the user gives its model, as `model.name=hf:DIR`."""


class TrainingRecipe(Document):
    """A training of the field: one or more runs, each from where the one before ended."""

    summary: str
    """In a sentence without a full stop."""
    notes: tuple[str, ...]
    """Where its values come from, a sentence each."""
    scales: dict[str, TrainingScale]


class TrainingPlan(Document):
    """A training recipe at one scale: everything that it runs."""

    recipe: str
    scale: str
    overrides: tuple[str, ...] = ()
    parts: tuple[RecipePart, ...]
    """With all their settings."""
    target: RecipeTarget | None = None
    needs_weights: bool = False
    """Whether the user gives its model, as `model.name=hf:DIR`."""
    notes: tuple[str, ...] = ()

    @property
    def asks_questions(self) -> bool:
        """Whether it reads conversations about the standard library, which it writes itself."""
        return any(part.settings.get("data.source") == CONVERSATIONS for part in self.parts)

    def request(self, part: RecipePart, *, seed: int | None = None) -> Request:
        """The request of a part.

        Args:
            part: one of `parts`.
            seed: of weights and order; None means the one in its settings, or 0.

        Raises:
            InputErrors: all keys and values that are not valid.
        """
        request = request_of(part.settings)
        if seed is None:
            return request
        train = request.train.model_copy(update={"seed": seed})
        return request.model_copy(update={"train": train})

    def require_weights(self) -> None:
        """Refuses to run without the weights that a user has to give.

        Raises:
            RequestError: a part that fine-tunes would begin with random weights.
        """
        for part in self.parts:
            name = self.request(part).model.name
            if self.needs_weights and not is_huggingface(name):
                raise RequestError(
                    f"recipe `{self.recipe}` at `--scale {self.scale}` fine-tunes weights that you "
                    f"have; name their folder (`model.name=hf:DIR`), and your conversations as "
                    "`data.source`"
                )


@cache
def training_recipes() -> dict[str, TrainingRecipe]:
    """All recipes of trainings, by name."""
    folder = files("windlass.experiments.recipes") / "trainings"
    texts = {file.name.removesuffix(".toml"): file.read_text("utf-8") for file in folder.iterdir()}
    return {name: TrainingRecipe(**tomllib.loads(texts[name])) for name in sorted(texts)}


def is_training_recipe(name: str) -> bool:
    """Whether a name, also with a dial as in `gpt-depth=12`, is a recipe of a training."""
    return name.partition("=")[0] in training_recipes()


def training_plan(name: str, *overrides: str, scale: str = "tiny") -> TrainingPlan:
    """What a training recipe runs, in order; nothing is planned or measured for it.

    Args:
        name: its name, with its dial where it has one: `gpt-depth=12`.
        overrides: `key=value` for all its parts.
        scale: one of its scales.

    Raises:
        RequestError: there is no such recipe, scale or dial.
        InputErrors: all overrides that are not valid.
    """
    plain, dialled, dial = name.partition("=")
    known = training_recipes()
    if plain not in known:
        raise RequestError(f"no recipe `{plain}`{did_you_mean(plain, known)}")
    recipe = known[plain]
    if scale not in recipe.scales:
        raise RequestError(
            f"recipe `{plain}` has no scale `{scale}`{did_you_mean(scale, recipe.scales)}; it has "
            f"{' and '.join(f'`{one}`' for one in recipe.scales)}"
        )
    chosen, given = recipe.scales[scale], settings_of(overrides)
    shared = chosen.settings | given
    target = None if given else chosen.target
    if dialled or chosen.depth is not None:
        depth = _depth(plain, chosen, dial if dialled else None)
        target = target if depth == chosen.depth else None
        shared = _settings_of_depth(chosen, depth, shared) | given
    # What is given counts in each part, also where the part has a value of its own.
    parts = tuple(
        part.model_copy(update={"settings": shared | part.settings | given})
        for part in chosen.parts
    )
    plan = TrainingPlan(
        recipe=name, scale=scale, overrides=overrides, parts=parts, target=target,
        needs_weights=chosen.needs_weights, notes=recipe.notes,
    )  # fmt: skip
    for part in parts:
        plan.request(part)
    return plan


def _depth(name: str, scale: TrainingScale, dial: str | None) -> int:
    """The depth that is asked for; None stands for the scale's own."""
    if scale.depth is None:
        raise RequestError(f"recipe `{name}` has no dial; leave out `={dial}`")
    if dial is None:
        return scale.depth
    if not (dial.isascii() and dial.isdigit() and 1 <= int(dial) <= _MOST_DEPTH):
        raise RequestError(
            f"`{name}={dial}`: the depth should be a number of layers from 1 to {_MOST_DEPTH}, "
            f"such as `{name}=12`"
        )
    return int(dial)


def _settings_of_depth(
    scale: TrainingScale, depth: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """The settings with those that follow from a depth."""
    request = request_of(settings)
    vocabulary = request.model.vocabulary or model_config(request.model.name).vocabulary
    return settings | depth_settings(
        depth,
        tokens_per_weight=scale.tokens_per_weight,
        vocabulary=vocabulary,
        sequence=int(settings["train.sequence"]),
    )


_WIDTH_PER_LAYER = 64
"""Source: nanochat (Karpathy 2025), where a model is 64 times as wide as it is deep."""
_HEAD_WIDTH = 64
"""Source: Brown et al. 2020, arXiv:2005.14165, table 2.1, models up to 760 M."""
_LEAST_FITTED_FLOP = 1e17
"""The smallest run that the law of the learning rate was fitted to. Source: as for the law."""


def depth_settings(
    depth: int, *, tokens_per_weight: float, vocabulary: int, sequence: int
) -> dict[str, Any]:
    """Keys of a request for a GPT of some depth: its shape, batch, learning rate and steps.

    With M FLOP a token and D tokens, C = M D; the batch is `0.2920 C^0.3271` tokens and the rate
    `0.3118 C^-0.1250`. M is `72 l d^2 + 12 l d s`, without the embeddings.
    Source: DeepSeek-AI 2024, arXiv:2401.02954, sections 3.1 and 3.2.

    A run of fewer FLOP than the law was fitted to takes the rate of the smallest that was: without
    a bound the law gives two layers 0.0079, and their losses then differ by 0.9 between seeds.

    Args:
        tokens_per_weight: tokens that are trained on for each weight; 20 by Hoffmann et al. 2022.
        vocabulary: entries of the embedding, which counts as weights.
    """
    width = _WIDTH_PER_LAYER * depth
    weights = 12 * depth * width**2 + (vocabulary + sequence) * width
    tokens = tokens_per_weight * weights
    flop = (72 * depth * width**2 + 12 * depth * width * sequence) * tokens
    # A power of two divides evenly over devices.
    batch = 2 ** max(0, round(log2(0.2920 * flop**0.3271 / sequence)))
    rate = 0.3118 * max(flop, _LEAST_FITTED_FLOP) ** -0.1250
    return {
        "model.layers": depth,
        "model.width": width,
        "model.heads": width // _HEAD_WIDTH,
        "train.batch": batch,
        "train.learning_rate": float(f"{rate:.3g}"),
        "train.steps": max(1, round(tokens / (batch * sequence))),
    }
