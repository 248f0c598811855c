"""`windlass probe`, `machines` and `models`: what there is to name in a request."""

from typing import Literal

from windlass import api
from windlass.cli.console import Bars, console
from windlass.machines import catalogue as machine_catalogue
from windlass.models import catalogue as model_catalogue
from windlass.report.table import machine_table
from windlass.units import show_count


def probe() -> None:
    """Measure this machine (under a minute) and keep the result for this user."""
    with Bars() as progress:
        machine = api.probe(progress=progress)
    console.print(machine_table(machine))


def machines(action: Literal["list", "show"] = "list", name: str = api.HERE) -> None:
    """List the machines that can be named, or show one with the source of its numbers.

    Args:
        action: `list` or `show`.
        name: the machine to show.
    """
    if action == "show":
        with Bars() as progress:
            machine = api.find_machine(name, progress=progress)
        console.print(machine_table(machine))
        return
    console.print(f"{api.HERE:<16} this machine, measured")
    for known in machine_catalogue.names():
        console.print(f"{known:<16} {machine_catalogue.find(known).source}", soft_wrap=True)


def models() -> None:
    """List the models that can be named."""
    for name in model_catalogue.names():
        shape = model_catalogue.shape(name)
        console.print(
            f"{name:<14} {shape.layers:>3} layers of {shape.width:>5}, {shape.heads:>3} heads, "
            f"vocabulary {show_count(shape.vocabulary)}, sequence {shape.sequence}"
        )
    console.print("or `file.py:function` of your own, which returns an `nn.Sequential` of layers")
