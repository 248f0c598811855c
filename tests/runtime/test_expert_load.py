"""The load of experts of all layers, read in one transfer, and the biases that follow from it."""

from dataclasses import replace

import torch

from windlass.models.build import build_layer_stack
from windlass.models.experts.routing import Router
from windlass.runtime.expert_load import ExpertLoad
from windlass.runtime.layer_templates import layer_templates
from windlass.runtime.parameters import resident_layers
from windlass.runtime.verify.compare_runs import same_load
from windlass.schema.run_record import Step
from windlass.torch_ext import device_for

DIALS = {"layers": 3, "width": 16, "heads": 2, "vocabulary": 64, "experts": 4, "capacity": 1.0}
SPEED = 0.25
STEP = Step(
    step=1, loss=1.0, gradient_norm=1.0, learning_rate=0.1, tokens=8, seconds=1.0, memory_bytes=1
)


def test_each_router_is_read_behind_the_totals_and_its_bias_moves_by_its_own_load():
    dials = {**DIALS, "kv_heads": 1, "ffn": 16, "expert_ffn": 16, "balance_bias": SPEED}
    stack = build_layer_stack("moe-tiny", dials, device="cpu", seed=1)
    device = device_for("cpu")
    layers = resident_layers(stack, seed=1, precision="float32", device=device.torch_device)
    templates = layer_templates(stack, compiled=False)
    computed = frozenset({0, 1, 2, 4})  # the last block belongs to another rank
    load = ExpertLoad(layers, templates, computed, device, counts=True)
    counts = torch.tensor([[5, 1, 1, 1], [2, 2, 3, 1]])
    routers = [
        dict(zip(template.buffers, layer.buffers, strict=True))
        for template, layer in zip(templates, layers, strict=True)
        if any(isinstance(module, Router) for module in template.module.modules())
    ]
    names = {
        kind: next(name for name in routers[0] if name.endswith(kind))
        for kind in ("load", "dropped", "balance_bias")
    }
    load.begin_step()
    for router, own in zip(routers[:2], counts, strict=True):
        router[names["load"]].copy_(own)
        router[names["dropped"]].fill_(int(own[0]))

    numbers = load.beside(torch.tensor([0.5, 7.0], dtype=torch.float64)).tolist()
    assert numbers == [0.5, 7.0, 5, 1, 1, 1, 2, 2, 3, 1, 0, 0, 0, 0, 5, 2, 0]

    load.end_step(numbers[2:])
    for router, own in zip(routers, (*counts, torch.zeros(4)), strict=True):
        expected = SPEED * torch.sign(own.float().mean() - own)
        if router is routers[2]:
            expected = torch.zeros(4)
        torch.testing.assert_close(router[names["balance_bias"]], expected, rtol=0, atol=0)
    assert list(load.totals.values()) == [(5, 1, 1, 1), (2, 2, 3, 1), (0, 0, 0, 0)]
    assert load.dropped_share == 7 / 16


def test_loads_are_equal_whether_a_process_told_them_or_not():
    own = replace(STEP, expert_load={"router": (1, 2)})
    told = replace(STEP, expert_load={"router": [1, 2]})
    assert same_load(told, own)
    assert not same_load(told, replace(STEP, expert_load={"router": (2, 1)}))
    assert not same_load(told, replace(own, dropped_share=0.1))
