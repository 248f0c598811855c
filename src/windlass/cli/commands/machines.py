"""`windlass machines`, `models` and `probe`: the names that a request can use."""

import sys
from pathlib import Path

from cyclopts import App
from rich import box
from rich.table import Table

from windlass import api
from windlass.api import AsJson, Flag
from windlass.capture import parameter_count
from windlass.cli.console import ProgressBars, console, print_json, print_line
from windlass.hardware import Question, StatedNumber, stated_numbers
from windlass.models import (
    ResNetConfig,
    TransformerConfig,
    model_config,
    model_names,
    resnet_config,
)
from windlass.report import machine_table, machines_table, numbers_table
from windlass.schema import Machine
from windlass.units import format_count

app = App(
    name="machines",
    help="List the machines that can be named; show, write or add one; compare them for a model.",
)
"""`windlass machines`, which lists, and its commands `list`, `show`, `new`, `add`, `compare`."""


@app.default
def list_machines(*, as_json: AsJson = False) -> None:
    """List the machines that can be named.

    `NAME:N` is N hosts of a family: `dgx-a100-80gb:8` is 8 hosts of 8 devices.

    Args:
        as_json: Print the machines as JSON.
    """
    entries = api.machines()
    if as_json:
        print_json([_machine_json(name, machine) for name, machine in entries])
        return
    if entries[0][0] != api.HERE:
        console.print(f"{api.HERE}: this machine, not measured yet; `windlass probe` does so")
    console.print(machines_table(entries, console.width))


def show_machine(name: str = api.HERE, *, as_json: AsJson = False) -> None:
    """Show every number of a machine with its source.

    For example: `windlass machines show dgx-h100:4`.

    Args:
        name: The machine; `here` is this one, and `NAME:N` is N hosts of a family.
        as_json: Print the machine and its numbers as JSON.
    """
    with ProgressBars() as progress:
        machine = api.find_machine(name, progress=progress)
    numbers = stated_numbers(machine)
    if as_json:
        print_json({"machine": machine, "numbers": [_number_json(number) for number in numbers]})
        return
    console.print(numbers_table(machine, numbers))


def write_machine(name: str, *answers: str) -> None:
    """Write a file for a machine of your own, NAME.toml, from a few answers.

    On a terminal each question that is left open is asked, and Enter takes its default. An answer
    that ends in `?`, and every default, is marked as a guess. The file is used as `--on NAME.toml`.

    For example: `windlass machines new lab device=rtx-4090 devices=4 hosts=2 network=100Gb/s`.

    Args:
        name: Name of the machine, and of its file in this folder.
        answers: Answers as `key=value`: `device` is one of the catalogue, or `other` with `peak`,
            `memory` and `memory_rate`; then `devices`, `hosts`, `link`, `network`, `cards`,
            `oversubscription`, `pod`, `host_memory`.
    """
    is_terminal = console.is_terminal and sys.stdin.isatty()
    path = api.write_machine(name, *answers, ask=_ask if is_terminal else None)
    machine = api.find_machine(str(path))
    guesses = [each for each in stated_numbers(machine) if each.source.how == "guess"]
    console.print(machine_table(machine))
    console.print(
        f"wrote {path}, with {len(guesses)} guesses; `windlass machines show {path}` lists them, "
        f"and `windlass plan MODEL --on {path}` plans for it"
    )


def add_machine(file: Path, *, name: str | None = None, replace: Flag = False) -> None:
    """Add the measured machine of a report of `windlass doctor`, so that plans can name it.

    For example: `windlass machines add windlass-doctor.toml`, then `windlass plan MODEL --on NAME`.

    Args:
        file: The report, from this machine or from another one.
        name: Its name in plans; the report's if not given.
        replace: Replace another machine of that name.
    """
    machine = api.add_machine(file, name, replace=replace)
    console.print(machine_table(machine))
    console.print(
        f"added `{machine.name}`; `windlass plan MODEL --on {machine.name}` plans for it",
        soft_wrap=True,
    )


def _ask(question: Question, wrong: str | None) -> str:
    if wrong is not None:
        console.print(wrong)
    hint = f" [{question.default}: {question.origin}]" if question.default else ""
    return console.input(f"{question.text}{hint}: ").strip()


app.command(list_machines, name="list", sort_key=0)
app.command(show_machine, name="show", sort_key=1)
app.command(write_machine, name="new", sort_key=2)
app.command(add_machine, name="add", sort_key=3)
app.command("windlass.cli.command:api.compare.compare_machines", name="compare", sort_key=4)


def models() -> None:
    """List the models that can be named, with their parameters and shapes.

    Parameters are counted from the shapes, as a plan counts them: what layers share counts once.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for head in ("parameters", "layers", "width", "heads", "sequence\nor image"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("vocabulary")
    for name in model_names():
        config = resnet_config(name) or model_config(name)
        table.add_row(name, format_count(parameter_count(config)), *_shape_of(config))
    console.print(table)
    print_line("or `hf:DIR`, a Hugging Face folder")
    print_line("or your own `file.py:function`, which returns an `nn.Module`")
    print_line(
        "Layers are blocks; parameters are counted from the shapes, embedding and head included."
    )


def _shape_of(config: TransformerConfig | ResNetConfig) -> tuple[str, ...]:
    """Layers, width, heads, the longest sequence or the image, and vocabulary or classes."""
    if isinstance(config, ResNetConfig):
        image, classes = "x".join(map(str, config.image)), f"{config.classes} classes"
        return str(config.layers), str(config.widths[-1]), "–", image, classes
    sequence, vocabulary = str(config.sequence), str(config.vocabulary)
    if config.image is not None:
        sequence, vocabulary = "x".join(map(str, config.image)), f"{vocabulary} classes"
    elif config.experts is not None:
        vocabulary += f", {config.experts.count} experts"
    return str(config.layers), str(config.width), str(config.heads), sequence, vocabulary


def probe() -> None:
    """Measure all of this machine (about two minutes), and keep the result for this user."""
    with ProgressBars() as progress:
        machine = api.probe(progress=progress)
    console.print(machine_table(machine))


def _machine_json(name: str, machine: Machine) -> dict[str, object]:
    return {
        "name": name,
        "devices": machine.devices,
        "tiers": machine.device.tiers,
        "peaks": {rate.precision: rate.peak for rate in machine.device.matmul},
        "links": machine.links,
        "execution_model": machine.execution_model,
        "source": machine.source,
    }


def _number_json(number: StatedNumber) -> dict[str, object]:
    return {"path": number.path, "value": number.value, "source": number.source}
