"""Plans for other software: a stack reaches prediction, search, plan file and refusals."""

from pathlib import Path

import pytest

import windlass
from windlass.errors import InputErrors, PlanError, RequestError, StackError
from windlass.hardware import load_machine
from windlass.schema import Plan

SMALL = ("train.batch=8", "train.sequence=2048", "model.layers=2", "train.steps=10")
PINNED = ("recompute=none", "batch.micro=8")


def _stack(folder: Path, name: str, **constants: object) -> str:
    """The file of a stack whose host takes next to no time."""
    lines = {"name": name, "about": "made", "launch_seconds": "1 ns", **constants}
    path = folder / f"{name}.toml"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in lines.items()))
    return str(path)


def test_attention_that_writes_its_scores_takes_the_time_of_their_bytes(home: Path) -> None:
    machine, layers, heads, batch, s, d = "a100-80gb", 2, 12, 8, 2048, 768
    times = {
        kernel: windlass.plan(
            "gpt3-125m", *SMALL, *PINNED, machine=machine,
            stack=_stack(home, kernel, attention=kernel),
        ).prediction.by_term
        for kernel in ("unfused", "flash2")
    }  # fmt: skip

    # Of bfloat16 scores a softmax reads and writes each forward; backward it reads two and writes
    # one. Queries, keys, values and results are copied there and back.
    scores, copies = 2 * heads * batch * s * s, 2 * 2 * 4 * batch * s * d
    rate = load_machine(machine).device.traffic.at
    by_hand = layers * sum(n / rate(n) for n in (2 * scores, 3 * scores, copies, copies))
    extra = times["unfused"]["traffic"] - times["flash2"]["traffic"]
    assert extra == pytest.approx(by_hand, rel=0.02)
    assert "attention" not in times["unfused"]


def test_a_plan_says_its_stack_and_its_file_is_planned_for_that_again(home: Path) -> None:
    planned = windlass.plan("gpt3-125m", *SMALL, machine="dgx-h100", stack="nemo")
    planned.plan.save(home / "plan.toml")

    again = windlass.plan(plan=home / "plan.toml")

    assert planned.plan.stack == "nemo"
    assert again.plan == planned.plan
    assert again.prediction.step_seconds == pytest.approx(planned.prediction.step_seconds)
    with pytest.raises(StackError, match=r"for the stack `nemo`, but `windlass` is named"):
        windlass.plan(plan=home / "plan.toml", stack="windlass")
    Plan.load(home / "plan.toml").model_copy(update={"stack": "mine"}).save(home / "other.toml")
    with pytest.raises(StackError, match=r"for the stack `mine`.*`--stack FILE\.toml`"):
        windlass.plan(plan=home / "other.toml")


@pytest.mark.usefixtures("home")
def test_windlass_named_as_the_stack_is_no_other_plan() -> None:
    plain = windlass.plan("gpt3-125m", *SMALL, machine="dgx-h100").plan

    assert windlass.plan("gpt3-125m", *SMALL, machine="dgx-h100", stack="windlass").plan == plain
    assert plain.stack is None


def test_a_plan_for_another_stack_is_not_trained(home: Path) -> None:
    planned = windlass.plan(
        "llama3-8b", "model.layers=2", "train.batch=8", "sharding.parameters=8",
        "sharding.reshard=true", machine="dgx-h100", stack="torchtitan",
    )  # fmt: skip

    lacks = "no gathering of parameters for each pass yet"
    with pytest.raises(PlanError, match=rf"stack `torchtitan`.*{lacks}"):
        windlass.train(planned, root=home)


def test_a_model_of_ones_own_is_refused_on_another_stack(home: Path) -> None:
    path = home / "mine.py"
    path.write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Embedding(9, 4))\n"
    )

    with pytest.raises(RequestError, match=r"a model of your own, and how `nemo` computes it"):
        windlass.plan(f"{path}:build", machine="dgx-h100", stack="nemo")


@pytest.mark.usefixtures("home")
def test_only_what_the_stack_can_run_is_searched() -> None:
    plan = windlass.plan(
        "gpt3-1.3b", "train.batch=64", "train.sequence=2048", machine="dgx-h100", stack="fsdp"
    ).plan

    assert (plan.parallel.pipeline, int(plan.parallel.tensor), plan.parallel.context) == (
        1,
        1,
        None,
    )
    assert plan.recompute != "selective"
    assert not plan.offloads


@pytest.mark.usefixtures("home")
def test_eight_bit_products_are_planned_where_they_are_asked_for() -> None:
    small = ("llama3-8b", "model.layers=2", "train.batch=8")

    plain = windlass.plan(*small, machine="dgx-h100", stack="nemo")
    faster = windlass.plan(*small, "precision=float8", machine="dgx-h100", stack="nemo")

    assert plain.plan.precision == "bfloat16"
    assert faster.prediction.step_seconds < plain.prediction.step_seconds
    with pytest.raises(InputErrors, match=r"states no rate for it"):
        windlass.plan(*small, "precision=float8", machine="dgx-a100-80gb", stack="nemo")


@pytest.mark.usefixtures("home")
def test_a_wafer_under_its_own_software_holds_one_layer_at_a_time() -> None:
    """Published: Cerebras trained GPT-J and GPT-NeoX on one CS-2."""
    pins = ("train.batch=120", "batch.micro=30", "phases=30", "precision=bfloat16")

    planned = windlass.plan("gpt-j-6b", *pins, machine="cs-2", stack="modelzoo")

    device, memoryx = planned.prediction.peaks
    assert device.peak_bytes < device.capacity_bytes
    assert memoryx.by_class["optimizer"] > memoryx.by_class["weights"] > 0


ONE_HOST = ("train.batch=32", "train.sequence=4096", "data.tokenizer=byte")


@pytest.mark.usefixtures("home")
def test_adapters_of_a_model_whose_state_fits_no_host_fit_it_on_another_stack() -> None:
    whole = windlass.plan("llama3-70b", *ONE_HOST, machine="dgx-h100", stack="nemo")
    with pytest.raises(PlanError, match="does not fit"):
        _ = whole.plan

    adapted = windlass.plan(
        "llama3-70b", *ONE_HOST, "lora.rank=16", machine="dgx-h100", stack="nemo"
    )
    assert adapted.plan.parallel.devices == 8


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("model", "stack", "override", "told"),
    [
        ("llama3-8b", "nemo", "lora.targets=['qkv']", "known for `lora.rank` alone"),
        ("llama3-8b", "fsdp", "lora.rank=16", "how `fsdp` trains a part of the weights"),
        ("llama3-8b", "nemo", "train.frozen=['embedding.*']", "how `nemo` trains a part of the"),
        ("qwen3-30b-a3b", "nemo", "lora.rank=16", "trains adapters of experts is not known"),
        ("mixtral-8x7b", "fsdp", "train.batch=8", "has experts, and how `fsdp` computes these"),
    ],
)
def test_what_a_stack_is_not_known_to_compute_is_refused_by_name(
    model: str, stack: str, override: str, told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        windlass.plan(model, override, machine="dgx-h100", stack=stack)
