"""A user's cache that already holds this machine, one for all workers of a test run."""

import os
from pathlib import Path

import pytest

from factories import tiny_machine
from windlass.hardware.local_machine import save_local_machine, system_fingerprint
from windlass.schema.machine.rates import AttentionRate, Curve, Point


def made_cache(factory: pytest.TempPathFactory) -> Path:
    """A folder for `XDG_CACHE_HOME` whose machine `here` has 8 GiB of memory and as much disk.

    Its rates of plain attention and of 16 bits are too slow to be chosen: processors without
    instructions for bfloat16 take ten times as long for a test in it.

    All tests of all workers share it, so that each graph is captured and each library is built
    once. Its disk is as fast as a host's memory.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    precisions = ("float32", "bfloat16", "float16")
    machine = tiny_machine(memory="8 GiB", host="8 GiB", precisions=precisions, bfloat16=1e10)
    memory, host = machine.device.tiers
    tiers = (memory, host.model_copy(update={"name": "disk"}))
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
