"""Tables of plans and predictions state what their documents hold, and label predictions so."""

import re
from collections.abc import Callable
from dataclasses import replace

from report.made_runs import graph, plan, prediction, with_offload
from report.rendering import render
from windlass.capture.analytic import analytic_graph
from windlass.models import model_config
from windlass.report.terminal.plan_tables import plan_table, prediction_table, runners_up_table
from windlass.schema.machine.provenance import ChosenDefault
from windlass.schema.plan import Offload, ShardingDegrees
from windlass.schema.sparsity import SparsityRequest
from windlass.tracking import RunRecord


def test_a_plan_is_described_in_words():
    text = render(plan_table(plan(), graph()))
    assert "gpt-tiny: 5.77 M parameters in 8 layers" in text
    assert "16 sequences of 256 tokens a step, in 4 micro-batches of 4" in text
    assert "bfloat16 with float32 master weights, compiled" in text


def test_a_plan_states_the_defaults_that_were_chosen_for_it_and_its_idle_devices():
    defaults = [
        ChosenDefault(key="train.batch", value=16, reason="for a small model"),
        ChosenDefault(key="train.sequence", value=64, reason="its longest"),
        ChosenDefault(key="train.steps", value=400, reason="for a small model"),
    ]
    text = render(plan_table(plan(), defaults=defaults, idle="uses 1 of 8 devices"))
    assert "devices      uses 1 of 8 devices" in text
    assert (
        "train.batch=16 train.steps=400 (for a small model); train.sequence=64 (its longest)"
        in " ".join(text.split())
    )
    assert not {"devices", "defaults"} & set(render(plan_table(plan())).split())


def test_a_plan_says_what_runs_as_a_section():
    assert "sections" not in render(plan_table(plan(), graph()))
    fused = plan().model_copy(update={"loss": "fused"})
    assert "the loss with its projection to the vocabulary" in render(plan_table(fused), 120)
    config = replace(model_config("gpt-tiny"), sparsity=SparsityRequest(level=0.5, block=16))
    text = render(plan_table(fused, analytic_graph(config)), 120)
    assert "the loss with its projection to the vocabulary, each sparse feed-forward" in text


def test_a_plan_states_its_sharding():
    single = plan()
    parallel = single.parallel.model_copy(update={"data": 4})
    sharding = ShardingDegrees(parameters=1, optimizer=2)
    text = render(
        plan_table(single.model_copy(update={"parallel": parallel, "sharding": sharding})), 120
    )
    assert "parameters replicated; optimizer state sharded over 2 replicas (ZeRO-1)" in text
    full = single.model_copy(update={"sharding": ShardingDegrees(parameters=2, optimizer=2)})
    text = render(plan_table(full.model_copy(update={"parallel": parallel})), 120)
    assert "parameters and optimizer state sharded over 2 replicas (FSDP)" in text
    assert "sharding" not in render(plan_table(single))


def test_every_number_of_a_prediction_is_labelled_predicted():
    text = render(prediction_table(prediction()))
    for block in text.split("\n\n"):
        assert block.strip() == "" or block.lstrip().startswith("predicted")
    assert "49.2 % = 130 GFLOP / (645 ms × 410 GFLOP/s)" in text
    assert "80 % interval" in text
    assert "528 MiB of 22.0 GiB" in text


def test_terms_are_listed_largest_first():
    text = render(prediction_table(prediction()))
    positions = [text.index(f"\n{name} ") for name in ("matmul", "traffic", "attention", "launch")]
    assert positions == sorted(positions)


def test_parts_that_round_to_nothing_are_added_up():
    terms = {"matmul": 1.0, "attention": 0.5, "norm": 0.002, "load": 0.001, "launch": 0.0}
    text = render(prediction_table(prediction().model_copy(update={"by_term": terms})))
    assert re.search(r"\nother +3\.00 ms +< 1 %", text)
    assert not re.search(r"\b(norm|load|launch)\b|\b0 %", text)


def test_a_plan_with_offload_states_what_it_writes_per_step_and_run(
    record: Callable[..., RunRecord],
):
    predicted = with_offload(record(count=3)).prediction
    assert predicted is not None
    offloading = plan().model_copy(update={"offload": Offload(optimizer="disk")})
    text = render(prediction_table(predicted, plan=offloading, steps=400))
    assert "predicted writes" in text
    assert "1.00 GiB a step to disk, 400 GiB over 400 steps" in text


def test_a_plan_that_does_not_fit_states_by_how_much():
    peak = prediction().peaks[0].model_copy(update={"capacity_bytes": 500 * 2**20})
    text = render(prediction_table(prediction().model_copy(update={"peaks": (peak,)})))
    assert re.search(r"of 500 MiB, \d+\.\d MiB too much", text)


def test_runners_up_state_why_they_were_not_chosen():
    text = render(runners_up_table([(plan(), prediction(), "slower"), (plan(), None, "too big")]))
    assert "all numbers predicted" in text
    assert "645 ms" in text
    assert "too big" in text
