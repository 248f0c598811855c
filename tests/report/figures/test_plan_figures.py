"""Figures of a plan before it runs: none leaves anything out, and all numbers are predicted."""

import json
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings, strategies as st

from factories import sharded_graph, tiny_graph, tiny_plan
from program.distributed_plans import MACHINE, distributed_plans
from windlass.cost.peak_memory import stage_tier_peaks
from windlass.cost.predict import predict_plan
from windlass.cost.simulator.event_simulator import simulate
from windlass.program.lowering.lower import lower
from windlass.program.replicas.zero_sharding import parameter_gather_group
from windlass.report.figures.device_mesh import device_mesh_figure
from windlass.report.figures.figure_sheet import PLAN_FIGURES, figure_sheet
from windlass.report.figures.memory import memory_over_time_figure, peak_memory_figure
from windlass.report.figures.memory_heatmap import memory_heatmap
from windlass.report.figures.phase_heatmap import phase_heatmap
from windlass.report.figures.waterfall import step_time_waterfall
from windlass.report.formatting import describe_sharding
from windlass.report.html.plan_page import plan_page
from windlass.report.plan_forecast import PlanForecast, describe_layers
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan
from windlass.schema.tensor_grid import TensorGrid
from windlass.units import format_seconds

SVG = "{http://www.w3.org/2000/svg}"
GRAPH = tiny_graph(layers=6, tied=False)
OFFLOAD = Offload(parameters="host", gradients="host", optimizer="host")
TO_A_HUNDREDTH = 0.02
"""Coordinates are written with two decimal digits, and a width adds up two of them."""


def forecast(graph: Graph, plan: Plan) -> PlanForecast:
    programs = lower(plan, graph)[:: plan.parallel.tensor * plan.parallel.data]
    return PlanForecast(
        plan=plan,
        graph=graph,
        machine=MACHINE,
        prediction=predict_plan(plan, graph, MACHINE),
        programs=programs,
        timeline=simulate(plan, graph, MACHINE, programs),
        stage_peaks=stage_tier_peaks(plan, graph, MACHINE, programs),
    )


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314  it is our own


def rects(svg: str) -> list[tuple[str, ET.Element]]:
    """The tooltip of each rectangle, and the rectangle."""
    elements = parsed(svg).iter(f"{SVG}rect")
    return [(text, rect) for rect in elements if (text := rect.findtext(f"{SVG}title"))]


def words(svg: str) -> str:
    return " | ".join(text.text or "" for text in parsed(svg).iter(f"{SVG}text"))


@given(drawn=distributed_plans())
@settings(max_examples=25)
def test_figures_of_every_plan_are_well_formed_and_labelled_predicted(
    drawn: tuple[Graph, Plan],
):
    planned = forecast(*drawn)
    for name in PLAN_FIGURES:
        svg = figure_sheet(planned, (name,))
        assert parsed(svg).tag == f"{SVG}svg"
        assert "redicted" in words(svg)
        assert not re.search(r"(?<![\w-])(nan|inf)(?![\w-])", svg)
    page = plan_page(planned)
    assert page.count("<svg") == len(PLAN_FIGURES)
    assert 'class="pill prepared">predicted<' in page


@given(
    stages=st.integers(1, 4),
    slices=st.sampled_from([1, 2, 4, TensorGrid(2, 2)]),
    replicas=st.sampled_from([1, 2, 4]),
)
def test_every_rank_has_its_cell(stages: int, slices: int, replicas: int):
    plan = tiny_plan(sharded_graph(GRAPH), MACHINE, pipeline=stages, tensor=slices, data=replicas)
    cells = [text for text, _ in rects(device_mesh_figure(plan)) if text.startswith("rank")]
    numbers = sorted(int(text.split()[1].rstrip(":")) for text in cells)
    assert numbers == list(range(plan.parallel.devices))


def test_tensor_parallel_ranks_of_a_grid_are_drawn_in_its_rows_and_columns():
    plan = tiny_plan(GRAPH, MACHINE, tensor=TensorGrid(4, 2))
    places = {
        text.split(":")[0]: (float(rect.get("x", 0)), float(rect.get("y", 0)))
        for text, rect in rects(device_mesh_figure(plan))
    }
    columns = {x for x, _ in places.values()}
    rows = {y for _, y in places.values()}
    assert (len(rows), len(columns)) == (4, 2)
    assert places["rank 2"] == (min(columns), sorted(rows)[1])


@pytest.mark.parametrize("sharding", [(1, 1), (2, 2), (4, 4), (1, 4), (2, 4), (2, 8), (8, 8)])
def test_rings_join_the_replicas_that_shard_together(sharding: tuple[int, int]):
    plan = tiny_plan(GRAPH, MACHINE, data=8, sharding=sharding)
    rings = sorted(
        text.removeprefix("replicas ") for text, _ in rects(device_mesh_figure(plan))
        if text.startswith("replicas")
    )  # fmt: skip
    blocks = [range(first, first + sharding[1]) for first in range(0, 8, sharding[1])]
    expected = (
        {tuple(sorted(parameter_gather_group(at, plan))) for at in range(8)}
        if sharding[0] > 1
        else set()
    )
    state = {tuple(block) for block in blocks} if sharding[1] > 1 else set()
    # FSDP shards the optimizer state with the parameters: one ring stands for both.
    groups = expected if expected == state else [*expected, *state]
    assert rings == sorted(", ".join(map(str, group)) for group in groups)


@pytest.mark.parametrize("sharding", [(1, 1), (1, 4), (2, 4), (4, 4)])
def test_the_legend_of_a_mesh_says_what_the_plan_says_of_its_sharding(sharding: tuple[int, int]):
    plan = tiny_plan(GRAPH, MACHINE, data=4, sharding=sharding)
    text = words(device_mesh_figure(plan))
    assert all(clause in text for clause in describe_sharding(plan).split("; "))
    assert ("ZeRO-1" in text) is (sharding in [(1, 4), (2, 4)])


def test_a_ring_joins_ranks_that_divide_sequences_and_shard_together():
    plan = tiny_plan(GRAPH, MACHINE, data=2, context=2, sharding=(4, 4))
    figure = device_mesh_figure(plan)
    assert "replicas 0, 1, 2, 3" in {text for text, _ in rects(figure)}
    assert {"replica 1", "part 2 of 2"} <= set(words(figure).split(" | "))


def test_a_gap_stands_for_the_middle_of_hundreds_of_replicas():
    plan = tiny_plan(GRAPH, MACHINE, data=512, pipeline=2, sharding=(512, 512))
    text = words(device_mesh_figure(plan))
    assert "… 505 more" in text
    assert "replica 0" in text
    assert "replica 511" in text


@given(drawn=distributed_plans())
def test_the_heat_map_has_the_time_of_each_layer_once_forward_and_once_backward(
    drawn: tuple[Graph, Plan],
):
    planned = forecast(*drawn)
    spent: dict[str, float] = {}
    for lane in planned.timeline.devices:
        for kind, layer, start, end in zip(
            lane.kinds, lane.layers, lane.starts, lane.ends, strict=True
        ):
            if kind.partition("_")[0] in ("forward", "backward", "recompute"):
                cell = f"layer {layer}, {'forward' if kind == 'forward' else 'backward'}"
                spent[cell] = spent.get(cell, 0.0) + end - start
    svg = phase_heatmap(planned)
    cells = sorted(text for text, _ in rects(svg) if text.startswith("layer"))
    assert cells == sorted(f"{cell}: {format_seconds(time)}" for cell, time in spent.items())
    assert {f"layer {layer}, forward" for layer in range(6)} <= spent.keys()
    rows = [text for text in words(svg).split(" | ") if text.endswith(("forward", "backward"))]
    assert len(set(rows)) == len(rows) == 2 * sum(len(s.phases) for s in planned.plan.stages)


@given(drawn=distributed_plans())
@settings(max_examples=25)
def test_memory_over_the_step_reaches_the_most_that_each_stage_holds(drawn: tuple[Graph, Plan]):
    planned = forecast(*drawn)
    points = parsed(memory_over_time_figure(planned)).findtext(f".//{SVG}desc") or ""
    lines = json.loads(points)["series"]
    assert [max(line["y"]) for line in lines] == pytest.approx(
        [max(lane.memory_bytes) for lane in planned.timeline.devices], rel=1e-3
    )


def test_a_layer_takes_memory_only_while_its_phase_has_it():
    plan = tiny_plan(
        GRAPH, MACHINE, phases=((0, 2), (2, 5), (5, 8)), offload=OFFLOAD, accumulation=2
    )
    svg = memory_heatmap(forecast(GRAPH, plan))
    drawn = [(text.split(",")[0], rect) for text, rect in rects(svg) if text.startswith("layer")]
    spans = {
        layer: [(float(rect.get("x", 0)), float(rect.get("x", 0)) + float(rect.get("width", 0)))
                for name, rect in drawn if name == f"layer {layer}"]
        for layer in range(8)
    }  # fmt: skip

    # The last phase is reached later than the first, and left before it.
    assert min(spans[5])[0] > min(spans[1])[0]
    assert max(end for _, end in spans[5]) < max(end for _, end in spans[1])
    darkest = max(float(rect.get("style", "").partition("opacity:")[2]) for _, rect in drawn)
    assert darkest == 1


@given(drawn=distributed_plans())
@settings(max_examples=25)
def test_the_terms_of_a_waterfall_reach_from_zero_to_the_step_time(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    prediction = predict_plan(plan, graph, MACHINE)
    bars = [(float(rect.get("x", 0)), float(rect.get("width", 0)), text)
            for text, rect in rects(step_time_waterfall(prediction))]  # fmt: skip
    _, *terms, whole = bars
    for (x, width, _), (after, _, _) in pairwise(terms):
        assert after <= x + width + TO_A_HUNDREDTH
    assert terms[0][0] == pytest.approx(whole[0])
    assert sum(prediction.by_term.values()) == pytest.approx(prediction.step_seconds)
    drawn_end = max(x + width for x, width, _ in terms)
    # A very small term is drawn wide enough to be seen.
    assert drawn_end == pytest.approx(whole[0] + whole[1], abs=0.8 + TO_A_HUNDREDTH)


@given(drawn=distributed_plans())
@settings(max_examples=25)
def test_memory_bars_are_proportional_to_their_bytes(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    planned = forecast(graph, plan)
    widths: dict[str, float] = {}
    for text, rect in rects(peak_memory_figure(planned)):
        if "," in text:
            stage = text.partition(",")[0]
            tier = float(rect.get("y", 0))
            widths[f"{stage} {tier}"] = widths.get(f"{stage} {tier}", 0) + float(
                rect.get("width", 0)
            )
    held = [peak.peak_bytes for tiers in planned.stage_peaks for peak in tiers if peak.peak_bytes]
    assert len(widths) == len(held)
    near = [tiers[0].peak_bytes for tiers in planned.stage_peaks]
    drawn_near = sorted(widths.items(), key=lambda each: float(each[0].split()[-1]))[: len(near)]
    assert max(near) == planned.prediction.peaks[0].peak_bytes
    longest = max(width for _, width in drawn_near)
    for nbytes, (_, width) in zip(near, drawn_near, strict=True):
        assert width / longest == pytest.approx(nbytes / max(near), abs=0.01)


def test_layers_of_a_stage_are_described_as_ranges():
    chunks = tiny_plan(GRAPH, MACHINE, pipeline=2, virtual_stages=2, schedule="interleaved",
                       accumulation=2)  # fmt: skip
    assert describe_layers(chunks, 0) == "layers 0–1, 4–5"
    assert describe_layers(tiny_plan(GRAPH, MACHINE, pipeline=8), 3) == "layer 3"
