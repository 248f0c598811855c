"""Figures, pages and traces of a plan and its predicted cost, before it runs."""

from pathlib import Path

from windlass.atomic_files import atomic_write, require_output_file, storage_errors
from windlass.cost import predict_plan, simulate, stage_tier_peaks
from windlass.errors import RequestError, did_you_mean
from windlass.jobs.planned import Planned
from windlass.jobs.run_records import require_trace_file
from windlass.planner import with_budget
from windlass.program import lower_stages
from windlass.report import (
    PLAN_FIGURES,
    PlanForecast,
    figure_sheet,
    perfetto_trace,
    plan_page,
    svg_size,
    write_png,
)
from windlass.schema import Plan, Prediction

_SUFFIXES = (".html", ".svg", ".png")


def forecast(planned: Planned) -> PlanForecast:
    """The chosen plan, or the one that comes nearest to fitting, with everything predicted of it.

    Raises:
        PlanError: nothing fits, and no plan comes near.
    """
    graph, machine = planned.graph, planned.machine
    plan, prediction = _chosen_or_nearest(planned)
    programs = lower_stages(plan, graph)
    return PlanForecast(
        plan=plan,
        graph=graph,
        machine=machine,
        prediction=prediction,
        programs=programs,
        timeline=simulate(plan, graph, machine, programs),
        stage_peaks=stage_tier_peaks(plan, graph, machine, programs),
    )


def _chosen_or_nearest(planned: Planned) -> tuple[Plan, Prediction]:
    result, request = planned.result, planned.request
    if result.fits or not result.infeasible:
        return planned.plan, planned.prediction
    plan = result.infeasible[0].plan
    prediction = predict_plan(plan, planned.graph, planned.machine)
    return plan, with_budget(prediction, request.memory or prediction.peaks[0].capacity_bytes)


def draw_plan(forecast: PlanForecast, path: Path, only: str | None = None) -> None:
    """Writes a forecast as a page or as figures.

    Args:
        forecast: a plan with its predictions.
        path: `.html` is a page with all figures; `.svg` and `.png` hold them one below the other.
        only: the name of one figure; None draws all.

    Raises:
        RequestError: no such kind of file or figure.
        StorageError: the file cannot be written, or there is no browser to draw a PNG.
    """
    require_drawable(path, only)
    with storage_errors(path):
        if path.suffix == ".html":
            atomic_write(path, plan_page(forecast))
            return
        _write(figure_sheet(forecast, tuple(PLAN_FIGURES) if only is None else (only,)), path)


def draw_figure(svg: str, path: Path) -> None:
    """Writes one figure to a file of its own.

    Args:
        svg: the figure.
        path: `.svg` or `.png`.

    Raises:
        RequestError: no such kind of file.
        StorageError: the file cannot be written, or there is no browser to draw a PNG.
    """
    require_drawable(path, pages=False)
    with storage_errors(path):
        _write(svg, path)


def _write(svg: str, path: Path) -> None:
    if path.suffix == ".svg":
        atomic_write(path, svg)
        return
    width, height = svg_size(svg)
    write_png(svg, path, width=round(width), height=round(height))


def write_plan_trace(forecast: PlanForecast, path: Path) -> None:
    """Writes the predicted timeline of a step as a trace for ui.perfetto.dev or chrome://tracing.

    Args:
        forecast: a plan with its predictions.
        path: the `.json` file to write.

    Raises:
        RequestError: `path` is no `.json` file.
        StorageError: the file cannot be written.
    """
    require_trace_file(path)
    atomic_write(path, perfetto_trace({"predicted": forecast.timeline}))


def require_drawable(path: Path, only: str | None = None, *, pages: bool = True) -> None:
    """Refuses what cannot be drawn, before anything is planned.

    Args:
        path: the file to write.
        only: the name of one figure of a plan.
        pages: whether an HTML page can be written.

    Raises:
        RequestError: no such kind of file or figure.
        StorageError: no file can be written there.
    """
    if path.suffix == ".html" and not pages:
        raise RequestError(f"a single picture is no page; write `{path.with_suffix('.svg')}`")
    if path.suffix not in _SUFFIXES:
        raise RequestError(
            f"`{path}` is no picture that can be drawn; end its name in {' or '.join(_SUFFIXES)}"
        )
    if only is not None and only not in PLAN_FIGURES:
        raise RequestError(
            f"no picture `{only}`{did_you_mean(only, PLAN_FIGURES)}; "
            f"there are {', '.join(PLAN_FIGURES)}"
        )
    if only is not None and path.suffix == ".html":
        raise RequestError(f"a page holds all pictures; for `{only}` alone write a .svg or .png")
    require_output_file(path)
