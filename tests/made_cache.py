"""A user's cache that already holds this machine, one for all workers of a test run."""

import os
from pathlib import Path

import pytest

from factories import tiny_machine
from windlass.hardware.local_machine import save_local_machine, system_fingerprint
from windlass.schema.machine.rates import AttentionRate, Curve, Point


def made_cache(factory: pytest.TempPathFactory, name: str, *, disk: str | None) -> Path:
    """A folder for `XDG_CACHE_HOME` whose machine `here` has 8 GiB of memory.

    Its rates of plain attention and of bfloat16 are too slow to be chosen: processors without
    instructions for bfloat16 take ten times as long for a test in it.

    All workers share it, so that each graph is captured and each library is built once.

    Args:
        factory: pytest's own.
        name: name of the folder.
        disk: capacity of an offload tier of that name, as fast as a host's; None for none.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    machine = tiny_machine(memory="8 GiB", host=disk, bfloat16=1e10)
    memory, *offload = machine.device.tiers
    tiers = (memory, *(tier.model_copy(update={"name": "disk"}) for tier in offload))
    slow = Curve(points=(Point(256.0, 1e9),))
    plain = AttentionRate(head_width=64, attention="math", forward=slow, backward=slow)
    matmul = tuple(
        rate.model_copy(update={"attention_rates": (plain,)}) for rate in machine.device.matmul
    )
    device = machine.device.model_copy(update={"tiers": tiers, "matmul": matmul})
    machine = machine.model_copy(
        update={"name": "here", "system": system_fingerprint(), "device": device}
    )
    save_local_machine(folder / "windlass", machine)
    return folder
