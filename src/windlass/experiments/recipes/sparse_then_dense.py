"""Recipe `sparse-then-dense`: sparse training beside dense and beside a narrower dense model.

Is a sparse model as good for the same tokens, FLOP or time, and better than a small dense one?
Every learning rate is constant after its warm-up, which takes as many steps in each arm. So each
point of a curve is the end of a run of that length, and one run serves all comparisons.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.errors import PlanError
from windlass.experiments.recipes.recipe_plan import (
    RecipeArm,
    RecipeLeg,
    RecipePlan,
    request_of,
    settings_of,
)
from windlass.jobs import NO_OBJECTS, Planned, Progress, capture, model_arguments, plan_request
from windlass.models import apply_model_arguments, model_config
from windlass.schema import ModelIdentity

DENSE, SPARSE, THEN_DENSE, NARROW = "dense", "sparse", "sparse-then-dense", "narrower-dense"
_UNTIL = 0.7
"""Share of the dense arm's steps after which the sparse-then-dense arm is dense."""
_WARM_UP = 0.1
"""Share of the dense arm's steps."""
_EVALUATIONS, _CHECKPOINTS = 16, 4
"""In as many steps as the dense arm has."""
_NARROW_FLOP = 0.01
"""Largest relative difference between the FLOP of the narrower and of the sparse model."""
_GRAIN = 16
"""Widths of the narrower model are multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """A size of the experiment."""

    settings: dict[str, Any]
    steps: int
    """Steps of the dense arm."""
    level: float
    block: int


SCALES = {
    "tiny": _Scale(
        settings={
            "model.name": "gpt-tiny", "model.layers": 2, "model.width": 256, "model.heads": 8,
            "model.vocabulary": 1024, "data.vocabulary": 1024, "train.sequence": 256,
            "train.batch": 8, "train.learning_rate": 1e-3,
        },
        steps=384, level=0.75, block=32,
    ),
    "full": _Scale(
        settings={
            "model.name": "gpt2-355m", "train.sequence": 1024, "train.batch": 256,
            "train.learning_rate": 3e-4,
        },
        steps=27_000, level=0.875, block=64,
    ),
}  # fmt: skip
"""`tiny` trains in minutes on two cores; `full` has 20 tokens for each weight of the dense arm."""


def make_plan(scale: str, overrides: tuple[str, ...], progress: Progress | None) -> RecipePlan:
    """The four arms, each as long as the FLOP of the dense arm last.

    Args:
        scale: a name of `SCALES`.
        overrides: `key=value` for all arms; `train.steps` and `sparsity.*` are taken from them.

    Raises:
        PlanError: no narrower model has the FLOP of the sparse one.
        WindlassError: what is wrong with an override, or an arm does not fit.
    """
    chosen = SCALES[scale]
    given = settings_of(overrides)
    sparsity = {"sparsity.level": chosen.level, "sparsity.block": chosen.block}
    sparsity |= {key: given.pop(key) for key in list(given) if key.startswith("sparsity.")}
    steps = int(given.pop("train.steps", chosen.steps))
    shared = chosen.settings | given
    dense = _planned(shared, progress)
    sparse = _planned(shared | sparsity, progress)
    narrow_model = narrower_model(
        dense.request.model_identity, sparse.prediction.model_flop / dense.request.train.batch,
        dense.request.train.sequence,
    )  # fmt: skip
    narrow = _planned(shared | narrow_model, progress)
    budget = steps * dense.prediction.model_flop
    switch = math.ceil(_UNTIL * steps)
    rest = (budget - switch * sparse.prediction.model_flop) / dense.prediction.model_flop
    legs = {
        DENSE: (_leg(dense, steps),),
        SPARSE: (_leg(sparse, budget / sparse.prediction.model_flop),),
        THEN_DENSE: (_leg(sparse, switch), _leg(dense, rest)),
        NARROW: (_leg(narrow, budget / narrow.prediction.model_flop),),
    }
    total = sum(leg.steps for leg in legs[THEN_DENSE])
    settings: dict[str, dict[str, Any]] = {
        DENSE: {},
        SPARSE: sparsity,
        THEN_DENSE: sparsity
        | {"sparsity.schedule": "then-dense", "sparsity.until": switch / total},
        NARROW: narrow_model,
    }
    level = f"{100 * float(sparsity['sparsity.level']):g} % of the blocks' weights absent"
    meanings = {
        DENSE: "all weights",
        SPARSE: level,
        THEN_DENSE: f"{level} until step {switch}, then all weights",
        NARROW: f"width {narrow_model['model.width']}, feed-forward {narrow_model['model.ffn']}",
    }
    planned = {DENSE: dense, SPARSE: sparse, THEN_DENSE: dense, NARROW: narrow}
    arms = tuple(
        RecipeArm(
            name=name,
            meaning=meanings[name],
            settings=settings[name] | _pace(steps, sum(leg.steps for leg in legs[name])),
            parameters=planned[name].graph.parameter_count,
            legs=legs[name],
        )
        for name in (DENSE, SPARSE, THEN_DENSE, NARROW)
    )
    every = max(1, steps // _EVALUATIONS)
    shared |= {
        "train.final_rate": 1.0, "train.evaluate_every": every, "train.keep": 1000,
        "train.save_every": every * max(1, _EVALUATIONS // _CHECKPOINTS),
    }  # fmt: skip
    return RecipePlan(
        recipe="sparse-then-dense",
        scale=scale,
        overrides=overrides,
        settings=shared,
        arms=arms,
        notes=tuple(_notes(steps, switch)),
    )


def _notes(steps: int, switch: int) -> Iterator[str]:
    yield (
        f"The dense model takes {steps} steps. The others go on until they have used its FLOP, and "
        "are read where they have used its tokens, its FLOP and its median wall time."
    )
    yield (
        "All arms read the same text in the same order, which differs from seed to seed, with the "
        "same learning rate: constant after a warm-up of as many steps."
    )
    yield (
        f"The sparse-then-dense arm is sparse for {switch} steps, {switch / steps:.0%} of the dense"
        " model's tokens, and dense from there on."
    )
    yield (
        "Each arm runs under the plan that is predicted fastest for it, so that the format of its "
        "numbers and what is compiled may differ."
    )
    yield (
        "An arm is called better only if the bands of both, from the lowest to the highest seed, "
        "do not meet. FLOP are those of Windlass's graph: products, attention and head, forward "
        "and backward."
    )


def _pace(dense_steps: int, steps: int) -> dict[str, Any]:
    """Steps and warm-up of an arm."""
    return {"train.steps": steps, "train.warmup": min(0.99, _WARM_UP * dense_steps / steps)}


def _planned(settings: dict[str, Any], progress: Progress | None) -> Planned:
    """The plan of some settings on this machine."""
    return plan_request(request_of(settings), NO_OBJECTS, progress)


def _leg(planned: Planned, steps: float) -> RecipeLeg:
    prediction = planned.prediction
    return RecipeLeg(
        steps=math.ceil(steps - 1e-9),
        flop=prediction.model_flop,
        predicted_seconds=prediction.step_seconds,
    )


def narrower_model(model: ModelIdentity, flop: float, sequence: int) -> dict[str, Any]:
    """Dials of the model that has as many layers, and a narrower width for so many FLOP.

    Its heads are about as wide; of all widths the one is taken whose feed-forward branch has most
    nearly the model's ratio.

    Args:
        flop: of one sequence, forward and backward.

    Raises:
        PlanError: no width comes within a hundredth of the FLOP.
    """
    config = apply_model_arguments(model_config(model.name), model_arguments(model))
    found: list[tuple[float, dict[str, Any]]] = []
    for width in range(_GRAIN, config.width, _GRAIN):
        heads = _heads(width, config.head_width)
        narrow = model.model_copy(update={"width": width, "heads": heads, "kv_heads": None})
        ffn = _ffn(narrow, flop, sequence)
        if ffn is not None:
            ratio = math.log((ffn / width) / (config.ffn / config.width))
            dials = {"model.width": width, "model.heads": heads, "model.ffn": ffn}
            found.append((abs(ratio), dials))
    if not found:
        raise PlanError(
            f"no model narrower than {config.width} has the {flop:.3g} FLOP a sequence of the "
            f"sparse one to within {_NARROW_FLOP:.0%}; change `sparsity.level` or `model.width`"
        )
    return min(found, key=lambda one: one[0])[1]


def _heads(width: int, head_width: int) -> int:
    """The number of heads that makes them most nearly as wide, and evenly so."""
    counts = [count for count in range(1, width + 1) if width % count == 0]
    return min(counts, key=lambda count: abs(math.log(width / count / head_width)))


def _ffn(model: ModelIdentity, flop: float, sequence: int) -> int | None:
    """The inner width at which a model has so many FLOP; None if none comes near.

    FLOP grow linearly with it.
    """
    few, many = _GRAIN, 2 * _GRAIN
    least, more = (_sequence_flop(model, ffn, sequence) for ffn in (few, many))
    ffn = round((few + (flop - least) / (more - least) * (many - few)) / _GRAIN) * _GRAIN
    if ffn < _GRAIN:
        return None
    error = abs(_sequence_flop(model, ffn, sequence) / flop - 1)
    return ffn if error <= _NARROW_FLOP else None


def _sequence_flop(model: ModelIdentity, ffn: int, sequence: int) -> float:
    graph = capture(model.model_copy(update={"ffn": ffn}))
    return graph.micro_batch_flop(1, sequence)
