"""Reports on a layer's traffic with far memory: published figures, laws, other ways to count."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from cost.dataflow.subjects import chip, subject, traces
from factories import catalog_graph
from windlass.cost.dataflow.dataflow_report import DataflowSubject, chip_rates, dataflow_report
from windlass.errors import MachineError, RequestError
from windlass.hardware import device_names, load_machine
from windlass.models import text_model_names
from windlass.schema.answers.dataflow import DataflowReport, FlowRole, FusionLevel

LARGE = 10**9
"""Bytes on a chip that holds the dense feed-forward branch of a GPT 13B as one section."""
SPARSITIES = (0.0, 0.75, 0.875, 0.95)
FIGURES: dict[float, tuple[tuple[int, int], ...]] = {
    0.0: ((797, 1078), (629, 1365), (461, 1862)),
    0.75: ((482, 445), (315, 683), (147, 1463)),
    0.875: ((430, 250), (262, 410), (94, 1138)),
    0.95: ((398, 108), (231, 186), (63, 683)),
}
"""MB and FLOP/byte kernel by kernel, with epilogues and as dataflow, of GEMM, GELU and GEMM of a
GPT 13B on 2,048 tokens in bfloat16, by sparsity."""
BIASES = 2 * (20480 + 5120)
"""Bytes of the branch's two biases, which the published figure leaves out."""
LEVELS: tuple[FusionLevel, ...] = ("kernel by kernel", "epilogue", "dataflow")


def report(on_chip_bytes: int = LARGE, *, ridge: float = 150.0) -> DataflowReport:
    return dataflow_report(subject(), chip(on_chip_bytes, ridge=ridge), SPARSITIES)


def test_the_published_figure_of_gemm_gelu_gemm_of_a_gpt_13b_is_regenerated():
    for level in report().curve:
        megabytes, intensity = FIGURES[level.sparsity][LEVELS.index(level.fusion)]
        far_bytes = level.far_bytes - BIASES
        assert round(far_bytes / 1e6) == megabytes
        assert round(level.intensity * level.far_bytes / far_bytes) == intensity


@pytest.mark.parametrize(("ridge", "above"), [(156, 0.93), (184, 0.91), (206, 0.90)])
def test_kernels_become_memory_bound_where_they_were_found_to_and_a_section_never_does(
    ridge: float, above: float
):
    thresholds = report(ridge=ridge).memory_bound_above
    assert thresholds["kernel by kernel"] == pytest.approx(above, abs=0.005)
    assert (thresholds["dataflow"] or 1.0) > 0.98


def test_a_threshold_is_where_the_flop_for_each_byte_equal_the_ridge():
    at = report().memory_bound_above["epilogue"]
    assert at is not None
    there = dataflow_report(subject(), chip(LARGE), (at,)).curve[1]
    assert (there.fusion, there.intensity) == ("epilogue", pytest.approx(150.0))


@pytest.mark.parametrize("model", ["gpt3-13b", "llama2-13b", "gpt-neox-20b", "bert-base"])
def test_kernel_by_kernel_each_pass_moves_what_the_ops_of_the_graph_move(model: str):
    graph = catalog_graph(model)
    for kind in graph.kinds:
        if kind == "embedding":
            continue  # its gradient is sparse, which the graph counts and the trace does not
        cost = graph.kinds[kind].cost("bfloat16", compiled=False)
        found = dataflow_report(subject(model, kind=kind, role=None, size=(2, 512)), chip(1), ())
        for name, ops in (("training forward", cost.forward), ("backward", cost.backward)):
            moved = sum(op.read_bytes.at(2, 512) + op.written_bytes.at(2, 512) for op in ops)
            level = found.flow(name).level("kernel by kernel")
            assert level.far_bytes == pytest.approx(moved)
            assert level.flop == pytest.approx(sum(op.flop.at(2, 512) for op in ops))


BLOCKS = ("block", "parallel_block", "bert_block")


def blocks(role: FlowRole | None, *, alike: bool) -> Iterator[DataflowSubject]:
    """The blocks of the catalogue; without those alike, the first of each sequence of ops."""
    seen = set()
    for model, kind in product(text_model_names(), BLOCKS):
        if kind in traces(model, "bfloat16"):
            about = subject(model, kind=kind, role=role, size=(1, 256))
            passes = (about.pass_ops(name) for name in ("training forward", "backward"))
            ops = tuple(tuple(op.kind for op in each.ops) for each in passes)
            if alike or ops not in seen:
                seen.add(ops)
                yield about


def assert_edges_add_up(about: DataflowSubject) -> None:
    for flow in dataflow_report(about, load_machine("b200"), ()).passes:
        far = [level.far_bytes for level in flow.levels]
        assert far == sorted(far, reverse=True)
        assert flow.whole.far_bytes <= far[-1]
        for level in (*flow.levels, flow.whole):
            ends = sum(edge.nbytes for edge in level.edges if not edge.on_chip)
            assert ends == pytest.approx(level.far_bytes)
            flop = sum(section.flop for section in level.sections)
            assert flop == pytest.approx(level.flop)


def test_every_kind_of_block_in_the_catalogue_has_a_report_whose_edges_add_up():
    kinds = list(blocks(None, alike=False))
    assert len(kinds) > 10
    for about in kinds:
        assert_edges_add_up(about)


@pytest.mark.slow
@pytest.mark.parametrize("role", [None, "attention", "feed-forward"])
def test_every_model_of_the_catalogue_has_a_report_whose_edges_add_up(role: FlowRole | None):
    for about in blocks(role, alike=True):
        assert_edges_add_up(about)


def test_training_writes_what_backward_reads_and_backward_writes_only_gradients():
    found = report()
    forward, training, backward = (flow.level("dataflow") for flow in found.passes)
    hidden = 2048 * 20480 * 2
    assert training.far_bytes - forward.far_bytes == 2 * hidden  # GELU's operand and its result
    written = {edge.tensor for edge in backward.edges if edge.target is None}
    assert written == {"parameter gradient", "result of mm"}
    products = [op for op in found.flow("backward").ops if op.kind == "matmul"]
    assert len(products) == 4
    assert sum(op.flop for op in products) == 2 * forward.flop


def test_sparsity_thins_weights_and_their_gradients_and_nothing_else():
    dense, sparse = (subject().pass_ops("backward", share) for share in (0.0, 0.875))
    for buffer, about in dense.buffers.items():
        is_matrix = about.is_weight and about.nbytes > 20480 * 2
        expected = about.nbytes / 8 if is_matrix else about.nbytes
        assert sparse.buffers[buffer].nbytes == expected
    assert sum(op.flop for op in sparse.ops) == sum(op.flop for op in dense.ops) / 8


def test_weights_of_different_sparsity_thin_each_with_its_gradient():
    up, down = "hidden.input.weight", "hidden.output.weight"
    about = replace(subject(), kept={up: 0.25, down: 0.5})
    for passed in (about.pass_ops("backward"), about.pass_ops("forward")):
        flop = {op.weight: op.flop for op in passed.ops if op.weight}
        assert flop[down] == 2 * flop[up]
    gradients = [
        buffer.nbytes
        for buffer in about.pass_ops("backward").buffers.values()
        if buffer.name == "parameter gradient" and buffer.nbytes > 20480 * 2
    ]
    assert sorted(gradients) == [0.25 * 2 * 5120 * 20480, 0.5 * 2 * 5120 * 20480]
    assert dataflow_report(about, chip(LARGE), SPARSITIES).curve == ()


@given(st.lists(st.integers(1, 10**10), min_size=2, max_size=2))
@settings(max_examples=20)
def test_a_larger_chip_never_moves_more_and_no_section_exceeds_it(sizes: list[int]):
    about = subject(role=None)
    small, large = sorted(sizes)
    levels = [
        dataflow_report(about, chip(size), ()).flow("training forward").level("dataflow")
        for size in (small, large)
    ]
    assert levels[1].far_bytes <= levels[0].far_bytes
    kernels = dataflow_report(about, chip(1), ()).flow("training forward").level("epilogue")
    one_kernel = {(section.first, section.last) for section in kernels.sections}
    for level, size in zip(levels, (small, large), strict=True):
        for section in level.sections:
            assert section.on_chip_bytes <= size or (section.first, section.last) in one_kernel


def test_dataflow_on_a_chip_without_memory_is_epilogue_fusion():
    flow = dataflow_report(subject(role=None), chip(1), ()).passes[0]
    assert flow.level("dataflow").far_bytes == flow.level("epilogue").far_bytes


def test_every_device_of_the_catalogue_states_its_memory_on_the_chip():
    for name in device_names():
        machine = load_machine(name)
        rates = chip_rates(machine, machine.device.half_precision)
        assert rates.on_chip_bytes > 0
        assert rates.ridge > 1


def test_device_memory_on_the_chip_makes_the_next_tier_far_memory():
    assert chip_rates(load_machine("wse-2"), "bfloat16").far_memory == "memoryx"
    assert chip_rates(load_machine("gc200"), "float16").far_memory == "streaming"
    assert chip_rates(load_machine("h100"), "bfloat16").far_memory == "device"


def test_a_machine_that_states_no_memory_on_its_chip_says_what_to_add():
    machine = chip(1)
    device = machine.device.model_copy(update={"on_chip_bytes": None})
    with pytest.raises(MachineError, match="add `on_chip_bytes"):
        chip_rates(machine.model_copy(update={"device": device}), "bfloat16")


def test_a_layer_without_the_asked_branch_says_how_branches_are_known():
    with pytest.raises(RequestError, match="named attention, attn"):
        subject(kind="head", role="attention").pass_ops("forward")
