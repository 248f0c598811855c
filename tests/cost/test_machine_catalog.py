"""Every machine of the catalog prices every plan that it has tiers and devices for."""

from math import isfinite

import pytest

from factories import sharded_graph, tiny_graph, tiny_plan
from windlass.cost.predict import predict_plan
from windlass.hardware import catalog
from windlass.schema.machine import Machine
from windlass.schema.plan import Offload

GRAPH = sharded_graph(tiny_graph(layers=6, tied=False))
WITH_HOSTS = [*catalog.machine_names(), *(f"{family.name}:2" for family in catalog.host_families())]


def away(machine: Machine) -> Offload:
    """Everything at home in the machine's first far tier."""
    tier = machine.device.tiers[1].name
    return Offload(parameters=tier, gradients=tier, optimizer=tier)


@pytest.mark.parametrize("name", WITH_HOSTS)
def test_a_plan_over_all_devices_and_tiers_of_a_machine_has_a_time(name: str):
    machine = catalog.load_machine(name)
    spare = machine.devices
    cut = {}
    for degree, most in (("tensor", 4), ("pipeline", 2), ("data", 8)):
        cut[degree] = most if spare % most == 0 else 1
        spare //= cut[degree]
    plan = tiny_plan(GRAPH, machine, precision=machine.device.half_precision, accumulation=2, **cut)
    told = predict_plan(plan, GRAPH, machine)
    assert 0 < told.low_seconds < told.step_seconds < told.high_seconds
    assert isfinite(told.high_seconds)
    if len(machine.device.tiers) > 1:
        streamed = tiny_plan(GRAPH, machine, phases=((0, 4), (4, 8)), offload=away(machine))
        moved = predict_plan(streamed, GRAPH, machine)
        assert moved.offload is not None
        assert moved.offload.seconds > 0
