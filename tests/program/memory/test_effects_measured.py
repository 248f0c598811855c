"""A second way of knowing the bytes of `effects`: torch's own record of every allocation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from factories import catalog_graph, tiny_machine, tiny_plan
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack
from windlass.program.instruction import Instruction, Program
from windlass.program.lowering.lower import lower
from windlass.program.memory.liveness import memory_profile
from windlass.runtime.compute import ComputeHandlers
from windlass.runtime.distributed.process_groups import SingleProcess
from windlass.runtime.layer_templates import layer_templates
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.rank_context import RankContext
from windlass.schema.graph import Graph, Precision
from windlass.schema.plan import Plan, Recompute
from windlass.schema.train_request import TrainSettings

SEQUENCE, VOCABULARY = 128, 2048


class RandomTokens:
    """Batches of tokens out of nowhere."""

    def __init__(self, batch: int, sequence: int) -> None:
        self._counts = np.full(batch, sequence)
        self._shape = sequence + 1

    def document_ids(self, step: int, first: int, count: int) -> None:
        del step, first, count

    def target_counts(self, step: int) -> np.ndarray:
        del step
        return self._counts

    def samples(self, step: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.random.default_rng(step + first).integers(0, 300, (count, self._shape))
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()


RECOMPUTE = (("none", None), ("full", None), ("full", 1), ("selective", None), ("selective", 1))
FAST = {
    (1, "none", None, "bfloat16"), (2, "none", None, "float32"), (1, "full", None, "float32"),
    (2, "full", 1, "float32"), (2, "selective", None, "bfloat16"), (1, "selective", 1, "float32"),
}  # fmt: skip
"""Together they have each mode, both precisions, and one micro-batch and two."""
DIALS = {"layers": 2, "width": 128, "heads": 4, "vocabulary": VOCABULARY, "sequence": SEQUENCE}


@pytest.fixture(scope="module")
def chain() -> LayerStack:
    return build_layer_stack("gpt-tiny", DIALS, device="meta", seed=0)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return catalog_graph("gpt-tiny", **DIALS)


def allocated_peak(
    plan: Plan, program: Program, chain: LayerStack, *, z_loss: float = 0.0, end: int | None = None
) -> int:
    """Most bytes of tensors over the second step, as torch's profiler saw them come and go.

    Args:
        plan: the plan.
        program: its program.
        chain: its model.
        z_loss: as a request names it.
        end: the instruction before which the second step ends.
    """
    settings = TrainSettings(
        steps=1, batch=1, sequence=16, seed=0, optimizer=plan.optimizer or "adamw", ema=plan.ema
    )
    context = RankContext(
        plan=plan, stack=chain, program=program, settings=settings, checkpoints=Path("unused")
    )
    optimizer = Optimizer(settings, context.device)
    store = ParamStore(context, optimizer, before_update=lambda _: None)
    compute = ComputeHandlers(
        context,
        store,
        layer_templates(
            chain,
            compiled=False,
            loss=plan.loss,
            attention=plan.attention,
            float8=plan.multiplies_float8,
            z_loss=z_loss,
        ),
        optimizer=optimizer,
        batches=RandomTokens(plan.global_batch, plan.batch.sequence),
        stop=lambda: False,
        dist=SingleProcess(),
    )
    handlers = compute.handlers()

    def step(number: int, end: int | None = None) -> None:
        compute.begin_step(number)
        for kind, layer, micro in program.instructions[:end]:
            handlers[kind](layer or 0, micro or 0)

    step(1)  # buffers that last are made
    compute.begin_step(2)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step(2, end)
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    lasting = {
        tensor.data_ptr(): tensor.nbytes
        for layer in store.layers
        for weight in layer.owned
        for tensor in (
            weight.master,
            weight.working,
            *(moment.values for moment in weight.moments),
            *(() if weight.average is None else (weight.average,)),
            *(() if weight.factors is None else (tensor for _, tensor in weight.factors.named)),
        )
    }
    held = peak = sum(lasting.values())
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("accumulation", "recompute", "few", "precision"),
    [
        pytest.param(*each, marks=() if each in FAST else pytest.mark.slow)
        for each in (
            (accumulation, *recompute, precision)
            for accumulation in (1, 2)
            for recompute in RECOMPUTE
            for precision in ("float32", "bfloat16")
        )
    ],
)
def test_the_peak_is_what_torch_allocates_to_half_a_percent(
    chain: LayerStack, graph: Graph, precision: Precision, recompute: Recompute, few: int | None,
    accumulation: int,
):  # fmt: skip
    plan = tiny_plan(
        graph, tiny_machine(), micro=4, sequence=SEQUENCE, accumulation=accumulation,
        recompute=recompute, recompute_layers=few, precision=precision,
    )  # fmt: skip
    (program,) = lower(plan, graph)
    measured = allocated_peak(plan, program, chain)
    assert memory_profile(program, plan, graph).peak_bytes == pytest.approx(measured, rel=0.005)


def test_before_a_table_is_looked_up_backward_its_tied_gradient_is_there_once(
    chain: LayerStack, graph: Graph
):
    plan = tiny_plan(graph, tiny_machine(), micro=2, sequence=32, accumulation=33)
    (program,) = lower(plan, graph)
    end = 1 + program.instructions.index(Instruction("backward", graph.layers - 1, 0))
    measured = allocated_peak(plan, program, chain, end=end)
    predicted = memory_profile(program, plan, graph).bytes_by_instruction[:end]
    assert max(predicted) == pytest.approx(measured, rel=0.01)


def test_factors_in_float8_take_what_torch_allocates_to_half_a_percent(
    chain: LayerStack, graph: Graph
):
    plan = tiny_plan(graph, tiny_machine(), micro=4, sequence=SEQUENCE, precision="float8")
    (program,) = lower(plan, graph)
    measured = allocated_peak(plan, program, chain)
    assert memory_profile(program, plan, graph).peak_bytes == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize(
    "optimizer",
    [
        *("muon", "adafactor", "ema"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("lion", "sgd", "lamb", "schedule-free")
        ),
    ],
)
def test_with_any_optimizer_the_peak_is_what_torch_allocates_to_half_a_percent(
    chain: LayerStack, graph: Graph, optimizer: str
):
    plan = tiny_plan(graph, tiny_machine(), micro=4, sequence=SEQUENCE, precision="float32")
    choice = {"ema": 0.9} if optimizer == "ema" else {"optimizer": optimizer}
    plan = plan.model_copy(update=choice)
    (program,) = lower(plan, graph)
    measured = allocated_peak(plan, program, chain)
    assert memory_profile(program, plan, graph).peak_bytes == pytest.approx(measured, rel=0.005)


def test_a_z_loss_takes_less_than_is_predicted_without_one(chain: LayerStack, graph: Graph):
    plan = tiny_plan(graph, tiny_machine(), micro=12, sequence=SEQUENCE, precision="float32")
    (program,) = lower(plan, graph)
    measured = allocated_peak(plan, program, chain, z_loss=1e-4)
    predicted = memory_profile(program, plan, graph).peak_bytes
    logits = 4 * 12 * SEQUENCE * graph.vocabulary
    assert predicted - logits <= measured <= 1.005 * predicted


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_fused_loss_takes_what_torch_allocates_to_half_a_percent(
    chain: LayerStack, graph: Graph, precision: Precision
):
    plan = tiny_plan(
        graph, tiny_machine(), micro=12, sequence=SEQUENCE, precision=precision
    ).model_copy(update={"loss": "fused"})  # fmt: skip
    (program,) = lower(plan, graph)
    measured = allocated_peak(plan, program, chain)
    assert memory_profile(program, plan, graph).peak_bytes == pytest.approx(measured, rel=0.005)


# Three tiles, of which the last is short.
@pytest.mark.parametrize(
    "model",
    [
        *("gpt-tiny", "modernbert-base"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-tiny", "bert-tiny")),
    ],
)
def test_plain_attention_takes_what_torch_allocates_to_half_a_percent(model: str):
    dials = DIALS | {"vocabulary": 300, "sequence": 320}
    graph = catalog_graph(model, **dials)
    plan = tiny_plan(graph, tiny_machine(), micro=4, sequence=320, precision="bfloat16")
    plan = plan.model_copy(update={"attention": "math"})
    (program,) = lower(plan, graph)
    stack = build_layer_stack(model, dials, device="meta", seed=0)
    measured = allocated_peak(plan, program, stack)
    assert memory_profile(program, plan, graph).peak_bytes == pytest.approx(measured, rel=0.005)
