"""`windlass probe`, `machines` and `models`: what there is to name in a request."""

from typing import Literal

from windlass import api
from windlass.cli.console import ProgressBars, console, print_json
from windlass.cli.options import AsJson
from windlass.hardware.number_sources import StatedNumber, stated_numbers
from windlass.models import catalog as model_catalogue
from windlass.report.terminal.machine_tables import machine_table, machines_table, numbers_table
from windlass.schema.machine import Machine
from windlass.units import format_count


def probe() -> None:
    """Measure this machine (under a minute) and keep the result for this user."""
    with ProgressBars() as progress:
        machine = api.probe(progress=progress)
    console.print(machine_table(machine))


def machines(
    action: Literal["list", "show"] = "list", name: str = api.HERE, *, as_json: AsJson = False
) -> None:
    """List the machines that can be named, or show every number of one with its source.

    `NAME:N` is N hosts of a family: `dgx-a100-80gb:8` is 8 hosts of 8 devices.

    Args:
        action: `list` or `show`.
        name: the machine to show.
        as_json: print machines and numbers as JSON.
    """
    if action == "list":
        _list(as_json=as_json)
        return
    with ProgressBars() as progress:
        machine = api.find_machine(name, progress=progress)
    told = stated_numbers(machine)
    if as_json:
        print_json({"machine": machine, "numbers": [_tree(number) for number in told]})
        return
    console.print(numbers_table(machine, told))


def _list(*, as_json: bool) -> None:
    found = api.machines()
    if as_json:
        print_json([_line(name, machine) for name, machine in found])
        return
    if found[0][0] != api.HERE:
        console.print(f"{api.HERE}: this machine, not measured yet; `windlass probe` does so")
    console.print(machines_table(found))


def _line(name: str, machine: Machine) -> dict[str, object]:
    return {
        "name": name,
        "devices": machine.devices,
        "tiers": machine.device.tiers,
        "peaks": {rate.precision: rate.peak for rate in machine.device.matmul},
        "links": machine.links,
        "rule": machine.execution_model,
        "source": machine.source,
    }


def _tree(number: StatedNumber) -> dict[str, object]:
    return {"place": number.path, "value": number.value, "source": number.source}


def models() -> None:
    """List the models that can be named."""
    for name in model_catalogue.model_names():
        shape = model_catalogue.model_config(name)
        console.print(
            f"{name:<14} {shape.layers:>3} layers of {shape.width:>5}, {shape.heads:>3} heads, "
            f"vocabulary {format_count(shape.vocabulary)}, sequence {shape.sequence}"
        )
    console.print("or `file.py:function` of your own, which returns an `nn.Sequential` of layers")
