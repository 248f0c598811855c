"""`recipe` plans, runs and reports a recipe; what has run in its folder is not run again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.atomic_files import atomic_write
from windlass.errors import InputErrors, RequestError, RunBroken, RunInterrupted, did_you_mean
from windlass.experiments.recipes import sparse_then_dense
from windlass.experiments.recipes.recipe_plan import RecipePlan
from windlass.experiments.recipes.training_recipe import training_recipes
from windlass.experiments.sweeping.sweep import Sweep, sweep
from windlass.jobs import Progress
from windlass.report import ArmsReport, arms_page
from windlass.sweep import SweepStatus

_PLAN_FILE, _PAGE_FILE = "recipe.json", "recipe.html"
RECIPE_SEEDS = 3
"""Seeds of each arm, unless a caller names another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An experiment or a training of the field, by name."""

    name: str
    summary: str
    """In a sentence without a full stop."""
    scales: tuple[str, ...]
    """Sizes that it can be run at, such as `tiny`, which ends in minutes on two cores."""
    make_plan: Callable[[str, tuple[str, ...], Progress | None], RecipePlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeResult:
    """A recipe that has run."""

    plan: RecipePlan
    folder: Path
    """Its run folders, tasks and scores."""
    page: Path
    report: ArmsReport


_RECIPES = (
    Recipe(
        name="sparse-then-dense",
        summary="dense, sparse, sparse-then-dense and a narrower dense model of the same FLOP, at "
        "equal tokens, FLOP and wall time",
        scales=tuple(sparse_then_dense.SCALES),
        make_plan=sparse_then_dense.make_plan,
    ),
)


def known_recipes() -> Mapping[str, Recipe]:
    """All recipes that compare arms, by name; `training_recipes` are the others."""
    return {recipe.name: recipe for recipe in _RECIPES}


def plan_recipe(
    name: str, *overrides: str, scale: str = "tiny", progress: Progress | None = None
) -> RecipePlan:
    """What a recipe would run on this machine, with predicted times; runs nothing.

    Args:
        name: its name.
        overrides: `key=value` for all its runs.
        scale: one of its scales.
        progress: called with how far planning is.

    Raises:
        RequestError: there is no such recipe or scale.
        WindlassError: what is wrong with an override, or a run does not fit.
    """
    recipe = _find(name)
    if scale not in recipe.scales:
        raise RequestError(
            f"recipe `{name}` has no scale `{scale}`{did_you_mean(scale, recipe.scales)}; it has "
            f"{' and '.join(f'`{one}`' for one in recipe.scales)}"
        )
    return recipe.make_plan(scale, overrides, progress)


def run_recipe(
    name: str,
    *overrides: str,
    folder: Path | str,
    scale: str = "tiny",
    seeds: int = RECIPE_SEEDS,
    jobs: int = 1,
    stop: Callable[[], bool] | None = None,
    observe: Callable[[SweepStatus], None] | None = None,
    progress: Progress | None = None,
) -> RecipeResult:
    """Runs a recipe to its end and writes its page; called again, it goes on where it was.

    Args:
        name: its name.
        overrides: `key=value` for all its runs.
        folder: receives its run folders; one that holds this recipe already is gone on with.
        scale: one of its scales.
        seeds: runs of each arm; more than before adds runs.
        jobs: runs at a time.
        stop: polled; True lets the runs save and end.
        observe: called with how far the runs are.
        progress: called with how far planning and scoring are.

    Raises:
        RequestError: there is no such recipe or scale, or the folder holds another one.
        RunBroken: a run failed.
        RunInterrupted: `stop` returned True; the same call goes on.
        WindlassError: what is wrong with an override or the folder.
    """
    if seeds < 1 or jobs < 1:
        raise RequestError(f"`seeds` = {seeds} and `jobs` = {jobs} should be at least 1")
    root, is_stopped = Path(folder), stop or (lambda: False)
    plan = _adopted_plan(root, name, overrides, scale, progress)
    found: Sweep | None = None
    for seed in range(1, seeds + 1):
        try:
            request = plan.sweep(seed, jobs)
            found = sweep(request, root=root, stop=is_stopped, observe=observe, progress=progress)
        except RunInterrupted as error:
            raise RunInterrupted(_where_it_stopped(root, plan, seeds)) from error
        _require_success(root, found)
    if found is None:
        raise RunBroken(f"recipe `{name}` has no runs")
    from windlass.experiments.recipes.arm_report import make_report

    report = make_report(plan, found, root, stop=is_stopped, progress=progress)
    page = root / _PAGE_FILE
    atomic_write(page, arms_page(report))
    return RecipeResult(plan=plan, folder=root, page=page, report=report)


def _find(name: str) -> Recipe:
    known = known_recipes()
    if name not in known:
        raise RequestError(
            f"no recipe `{name}`{did_you_mean(name, (*known, *training_recipes()))}; "
            "`windlass recipe` lists all"
        )
    return known[name]


def _adopted_plan(
    root: Path, name: str, overrides: tuple[str, ...], scale: str, progress: Progress | None
) -> RecipePlan:
    """The plan that a folder holds; a new one, which it then holds, in a folder without one."""
    path = root / _PLAN_FILE
    if not path.is_file():
        plan = plan_recipe(name, *overrides, scale=scale, progress=progress)
        plan.save(path)
        return plan
    plan = RecipePlan.load(path)
    wanted: dict[str, str | tuple[str, ...]] = {
        "recipe": name,
        "scale": scale,
        "overrides": overrides,
    }
    faults = [
        f"`{root}` holds a recipe with `{key}` = {_shown(getattr(plan, key))}, and not "
        f"{_shown(value)}; name another folder for it"
        for key, value in wanted.items()
        if getattr(plan, key) != value
    ]
    if faults:
        raise InputErrors(faults)
    return plan


def _shown(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else " ".join(value) or "none"


def _where_it_stopped(root: Path, plan: RecipePlan, seeds: int) -> str:
    done = len(list(root.glob(f"{plan.name}-*")))
    return (
        f"recipe `{plan.recipe}` stopped in run {done} of {seeds * len(plan.arms)}; the same "
        "command goes on"
    )


def _require_success(root: Path, found: Sweep) -> None:
    """Refuses a sweep with runs that failed."""
    for trial in found.trials:
        if trial.state == "failed":
            raise RunBroken(
                f"run `{root / trial.run}` failed: {trial.reason}; mend that and start again in "
                "another folder"
            )
