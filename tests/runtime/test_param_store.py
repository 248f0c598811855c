"""Where weights are kept: by one store, and by a model that only answers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from windlass.models.layer_stack import LayerStack
from windlass.program.instruction import Program
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.parameters import MasterParameter, resident_layers
from windlass.runtime.rank_context import RankContext
from windlass.schema.plan import Plan
from windlass.schema.train_request import TrainSettings


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_only_rank_keeps_masters_in_the_memory_of_the_models_own_weights(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    settings: Callable[..., TrainSettings],
    tmp_path: Path,
    precision: str,
):
    stack = gpt()
    run_plan = plan(stack, precision=precision)
    context = RankContext(
        plan=run_plan, stack=stack, program=program(run_plan), settings=settings(),
        checkpoints=tmp_path,
    )  # fmt: skip
    optimizer = Optimizer(context.settings, context.device)
    store = ParamStore(context, optimizer, before_update=lambda _: None)
    own = {parameter.data_ptr() for layer in stack.layers for parameter in layer.parameters()}
    weights = [weight for layer in store.layers for weight in layer.owned]
    assert {weight.master.data_ptr() for weight in weights} == own
    assert all((weight.working is weight.master) == (precision == "float32") for weight in weights)


def test_a_model_that_only_answers_keeps_each_weight_once_in_its_precision(
    gpt: Callable[..., LayerStack],
):
    layers = resident_layers(gpt(), seed=0, precision="bfloat16", device=torch.device("cpu"))
    weights = [weight for layer in layers for weight in (*layer.owned, *layer.frozen)]
    assert weights
    assert {weight.working.dtype for weight in weights} == {torch.bfloat16}
    assert not any(isinstance(weight, MasterParameter) for weight in weights)
