"""Runs of plans compared with a plain PyTorch training loop."""

import copy
import errno
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from windlass.data.batches import Batches
from windlass.data.examples import IGNORED_TARGET, ExampleBatches, ExampleDataset
from windlass.errors import PlanError, RunBroken, StorageError
from windlass.models.layer_stack import LayerStack, layer_stack_from_module
from windlass.program.instruction import Program
from windlass.runtime import param_store
from windlass.runtime.checkpoint.checkpoint import latest_checkpoint
from windlass.runtime.checkpoint.safetensors_io import FileChecksum, write_tensors
from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import TimelineRecorder, train_loop
from windlass.schema.plan import Plan
from windlass.schema.run_record import Step
from windlass.schema.train_request import TrainSettings

SAME = 1e-6
"""Relative tolerance of sums in float32 taken in another order."""


def plain_loop(
    stack: LayerStack,
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    micro: int,
):
    """Losses, norms and weights of a plain PyTorch loop over the full model."""
    model = nn.ModuleDict(dict(zip(stack.names, stack.layers, strict=True)))
    for tied, owner in stack.tied_weights.items():
        module, _, leaf = tied.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(owner))
    parameters = list(model.parameters())
    decays = {True: settings.weight_decay, False: 0.0}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if (p.dim() >= 2) == wide], "weight_decay": decay}
            for wide, decay in decays.items()
        ],
        betas=settings.betas,
        eps=settings.epsilon,
    )
    losses, norms = [], []
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.zero_grad()
        parts = []
        for first in range(0, settings.batch, micro):
            x, y = map(torch.from_numpy, batches.samples(step, first, micro))
            for layer in model.values():
                x = layer(x)
            loss = functional.cross_entropy(x.flatten(0, 1), y.flatten())
            (loss * micro / settings.batch).backward()
            parts.append(loss.item())
        losses.append(sum(parts) / len(parts))
        norms.append(float(nn.utils.clip_grad_norm_(parameters, settings.clip or math.inf)))
        optimizer.step()
    return losses, norms, dict(model.named_parameters())


def saved_weights(folder: Path):
    """Full name -> weight, read from the newest checkpoint by the safetensors library."""
    weights = {}
    for path in sorted(latest_checkpoint(folder).path.glob("*.safetensors")):
        tensors = load_file(path)
        weights |= {k.removeprefix("weight/"): v for k, v in tensors.items() if "weight/" in k}
    return weights


@pytest.mark.parametrize(
    ("model", "dials", "micro", "recompute"),
    [
        ("gpt-tiny", {}, 4, "none"),
        ("gpt-tiny", {}, 2, "full"),
        ("gpt-tiny", {}, 1, "none"),
        ("llama-tiny", {"kv_heads": 2}, 2, "none"),
        ("llama-tiny", {"kv_heads": 2}, 2, "full"),
    ],
)
def test_a_run_equals_a_plain_loop_over_the_full_model(
    model: str,
    dials: dict[str, int],
    micro: int,
    recompute: str,
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack = gpt(model, **dials)
    request, data = settings(), batches()
    run_plan = plan(stack, micro=micro, accumulation=4 // micro, recompute=recompute)
    losses, norms, weights = plain_loop(copy.deepcopy(stack), data, request, micro)
    context = RankContext(
        plan=run_plan, stack=stack, program=program(run_plan), settings=request, checkpoints=folder
    )
    steps = list(train_loop(context, data))
    assert [step.loss for step in steps] == pytest.approx(losses, rel=SAME)
    assert [step.gradient_norm for step in steps] == pytest.approx(norms, rel=SAME)
    ours = saved_weights(folder)
    assert ours.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight.detach(), rtol=SAME, atol=SAME, msg=name)


def run_once(
    run_plan: Plan,
    stack: LayerStack,
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    program: Callable[[Plan], Program],
    folder: Path,
    **options: TimelineRecorder,
) -> list[Step]:
    """All steps of a run on a copy of the stack, whose weights the run takes over."""
    stack = copy.deepcopy(stack)
    context = RankContext(
        plan=run_plan, stack=stack, program=program(run_plan), settings=settings, checkpoints=folder
    )
    return list(train_loop(context, batches, **options))


def test_each_step_keeps_its_own_load_of_experts(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    settings: Callable[..., TrainSettings],
    batches: Callable[..., Batches],
    tmp_path: Path,
):
    stack = gpt("llama-tiny", device="meta", experts=4, expert_ffn=16)
    whole = plan(stack)
    context = RankContext(
        plan=whole, stack=stack, program=program(whole), settings=settings(),
        checkpoints=tmp_path,
    )  # fmt: skip
    steps = list(train_loop(context, batches()))
    assert len({str(step.expert_load) for step in steps}) == len(steps)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recompute_is_bit_identical_with_dropout(
    precision: str,
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack = gpt(dropout=0.2)
    results = []
    for recompute in (
        {}, {"recompute": "full"}, {"recompute": "full", "recompute_layers": 2},
        {"recompute": "selective"},
    ):  # fmt: skip
        run_plan = plan(stack, micro=2, accumulation=2, precision=precision, **recompute)
        place = folder / str(len(results))
        run_once(run_plan, stack, batches(), settings(), program, place)
        results.append(latest_checkpoint(place).manifest.files)
    assert results == results[:1] * 4


def test_on_a_cpu_a_deterministic_run_gives_the_bits_of_any_other(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack, results = gpt(dropout=0.2), []
    for deterministic in (None, True):
        run_plan = plan(stack, micro=2, accumulation=2, deterministic=deterministic)
        place = folder / str(deterministic)
        run_once(run_plan, stack, batches(), settings(), program, place)
        results.append(latest_checkpoint(place).manifest.files)
    assert results[0] == results[1]
    assert not torch.are_deterministic_algorithms_enabled()


class Overwriting(nn.Module):
    """Writes to indices that may repeat, for which torch has no deterministic kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x.new_zeros(1).put_(torch.tensor([0]), x.detach().flatten()[:1])
        return x + 0 * first


def test_a_deterministic_run_refuses_a_layer_without_a_deterministic_kernel(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    first, block, *_, last = gpt().layers
    layers = nn.Sequential(first, nn.Sequential(block, Overwriting()), last)
    stack = layer_stack_from_module(layers, "x")
    run_plan = plan(stack, deterministic=True)
    with pytest.raises(PlanError, match=r"put_ does not have a deterministic implementation"):
        run_once(run_plan, stack, batches(), settings(), program, folder)
    assert not torch.are_deterministic_algorithms_enabled()


class UnkeyedDropout(nn.Module):
    """Draws from torch's generator instead of from keys."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.inner(x), 0.3, training=self.training)


def test_recompute_is_bit_identical_where_a_layer_uses_the_generator(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    first, *blocks, last = gpt().layers
    stack = layer_stack_from_module(nn.Sequential(first, *map(UnkeyedDropout, blocks), last), "x")
    results = []
    for recompute in ("none", "selective", "full"):
        run_plan = plan(stack, micro=2, accumulation=2, recompute=recompute)
        run_once(run_plan, stack, batches(), settings(), program, folder / recompute)
        results.append(latest_checkpoint(folder / recompute).manifest.files)
    assert results == results[:1] * 3


def test_dropped_elements_do_not_depend_on_the_micro_batch(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack = gpt(dropout=0.2)
    losses = []
    for micro in (1, 4):
        run_plan = plan(stack, micro=micro, accumulation=4 // micro)
        steps = run_once(run_plan, stack, batches(), settings(), program, folder / str(micro))
        losses.append([step.loss for step in steps])
    assert losses[0] == pytest.approx(losses[1], rel=SAME)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("float32", 1e-6), pytest.param("bfloat16", 2e-3, marks=pytest.mark.slow)],
)
def test_a_compiled_run_is_close_to_an_eager_one(
    precision: str,
    tolerance: float,
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack = gpt(dropout=0.1)
    losses = []
    for compiled in (False, True):
        run_plan = plan(stack, micro=2, accumulation=2, precision=precision, compile=compiled)
        steps = run_once(run_plan, stack, batches(), settings(), program, folder / str(compiled))
        losses.append([(step.loss, step.held_out_loss or 0) for step in steps])
    for eager, compiled in zip(*losses, strict=True):
        assert compiled == pytest.approx(eager, rel=tolerance)


def test_bfloat16_learns_like_float32(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack = gpt()
    losses = []
    for precision in ("float32", "bfloat16"):
        run_plan = plan(stack, precision=precision)
        request = settings(steps=30)
        steps = run_once(run_plan, stack, batches(), request, program, folder / precision)
        losses.append(steps[-1].loss)
        assert steps[-1].loss < steps[0].loss - 1
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_run_without_a_grad_norm_instruction_reports_the_norm(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack = gpt()
    results = []
    for clip in (True, False):
        run_plan = plan(stack, clip=clip)
        request = settings(clip=None)
        steps = run_once(run_plan, stack, batches(), request, program, folder / str(clip))
        results.append([(step.loss, step.gradient_norm) for step in steps])
    for with_norm, without in zip(*results, strict=True):
        assert without == pytest.approx(with_norm, rel=SAME)


def test_held_out_loss_is_that_of_the_full_model(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack, data, request = gpt(dropout=0.3), batches(), settings()
    last = run_once(plan(stack), stack, data, request, program, folder)[-1]
    model = gpt(dropout=0.3)
    state = saved_weights(folder)
    total, count = 0.0, 0
    with torch.no_grad():
        for name, layer in zip(model.names, model.layers, strict=True):
            layer.eval()
            for inner, parameter in layer.named_parameters():
                full = f"{name}.{inner}"
                parameter.copy_(state[model.tied_weights.get(full, full)])
        for inputs, targets in data.held_out_batches(request.evaluate_sequences):
            x = torch.from_numpy(inputs)
            for layer in model.layers:
                x = layer(x)
            y = torch.from_numpy(targets).flatten()
            total += float(functional.cross_entropy(x.flatten(0, 1), y))
            count += 1
    assert last.held_out_loss == pytest.approx(total / count, rel=SAME)
    bits = data.bits_per_byte(last.held_out_loss, request.evaluate_sequences)
    assert last.held_out_bits_per_byte == bits


class Poison(nn.Module):
    """Returns NaN at one of its calls, and its inner layer's output at all others."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.left = inner, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        return self.inner(x) * (float("nan") if self.left == 0 else 1.0)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_documents(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    good = gpt()
    poison = Poison(good.layers[1])
    stack = layer_stack_from_module(nn.Sequential(good.layers[0], poison, good.layers[-1]), "x")
    poison.left = 6  # two micro-batches a step: in step 3, micro-batch 1
    run_plan = plan(stack, micro=2, accumulation=2)
    data = batches()
    with pytest.raises(RunBroken) as broken:
        run_once(run_plan, stack, data, settings(steps=5, save_every=1), program, folder)
    message = str(broken.value)
    assert "step 3, micro-batch 1" in message
    for name in {*data.document_names(3, 2), *data.document_names(3, 3)}:
        assert f"`{name}`" in message
    assert "step-00000002" in message
    assert latest_checkpoint(folder).manifest.step == 2
    assert broken.value.exit_code == 1


class Kink(nn.Module):
    """Adds zero, with a gradient of NaN."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + (0 * x).abs().sqrt()


def test_a_step_without_any_target_stops_the_run_and_says_what_would_help(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack = gpt()
    run_plan = plan(stack, micro=2, accumulation=2)
    tokens = np.arange(6 * 16).reshape(6, 16) % 64
    targets = np.where(np.arange(6)[:, None] < 5, IGNORED_TARGET, tokens)
    examples = ExampleDataset(inputs=tokens, targets=targets, held_out=1)
    with pytest.raises(RunBroken, match="none of the 4 samples of step 1 has a target"):
        list(
            train_loop(
                RankContext(
                    plan=run_plan, stack=stack, program=program(run_plan), settings=settings(),
                    checkpoints=folder,
                ),
                ExampleBatches(examples, batch=4, seed=0),
            )
        )  # fmt: skip


def test_a_gradient_that_is_not_finite_stops_the_run_and_names_a_weight(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    good = gpt()
    layers = [good.layers[0], good.layers[1], Kink(good.layers[2]), good.layers[-1]]
    stack = layer_stack_from_module(nn.Sequential(*layers), "x")
    with pytest.raises(RunBroken, match=r"gradient of `0.tokens.weight` and \d+ others.*step 1"):
        run_once(plan(stack), stack, batches(), settings(), program, folder)


def test_a_recorded_step_has_a_timeline_with_memory(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack, recorded = gpt(), {}
    run_plan = plan(stack, micro=2, accumulation=2)
    recorder = TimelineRecorder(steps=frozenset({2}), record=recorded.__setitem__)
    steps = run_once(run_plan, stack, batches(), settings(), program, folder, recorder=recorder)
    timeline = recorded.pop(2).devices[0]
    assert recorded == {}
    assert list(timeline.kinds) == [i.kind for i in program(run_plan).instructions]
    assert min(timeline.memory_bytes) > 2**20
    assert max(timeline.memory_bytes) <= steps[-1].memory_bytes
    assert sum(steps[1].by_kind.values()) <= steps[1].seconds == timeline.ends[-1]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no scheduler statistics")
def test_steps_record_for_which_share_threads_waited_for_a_core(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack = gpt()
    run_plan = plan(stack, micro=4)
    context = RankContext(
        plan=run_plan, stack=stack, program=program(run_plan), settings=settings(),
        checkpoints=folder,
    )  # fmt: skip
    # A step of a few milliseconds may end before the system has counted again.
    shares = [step.contention for step in train_loop(context, batches())]
    known = [share for share in shares if share is not None]
    assert known
    assert all(0 <= share < 1 for share in known)


def test_a_full_disk_ends_the_run_at_the_next_step(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    stack = gpt()

    def full(path: Path, tensors: Iterable[tuple[str, torch.Tensor]], *_: None) -> FileChecksum:
        if "step-00000003" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_tensors(path, tensors)

    monkeypatch.setattr(param_store, "write_tensors", full)
    run_plan, seen = plan(stack), []
    request = settings(steps=9, save_every=1)
    context = RankContext(
        plan=run_plan, stack=stack, program=program(run_plan), settings=request, checkpoints=folder
    )
    steps = train_loop(context, batches())
    with pytest.raises(StorageError, match="no space left"):
        seen.extend(step.step for step in steps)
    assert seen[:3] == [1, 2, 3]
    assert len(seen) < 5
    assert latest_checkpoint(folder).manifest.step == 2
