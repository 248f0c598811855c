"""The machines that a request can name: the catalogue's, and this one, measured on first use."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, get_args

from rich.console import RenderableType

from windlass.answer import Answer, Shown
from windlass.atomic_files import atomic_write, cache_folder, data_folder, one_process
from windlass.cost import head_width
from windlass.errors import InputErrors, MachineError
from windlass.flags import Ask, Flag, Watch
from windlass.hardware import (
    LOCAL_MACHINE_FILE,
    Question,
    StatedNumber,
    accelerator_names,
    answer_faults,
    device_names,
    host_families,
    is_local_machine_changed,
    load_local_machine,
    load_machine,
    load_user_machine,
    machine_of_report,
    machine_text,
    name_fault,
    new_machine,
    next_question,
    save_local_machine,
    save_user_machine,
    stated_numbers,
    user_machine_names,
)
from windlass.report import MachinesTable, machine_table, numbers_table
from windlass.schema import (
    HEAD_PARTS,
    OWN_STACK,
    TYPICAL_HEAD_WIDTH,
    Graph,
    Machine,
    MachinePart,
    Plan,
    Request,
    Stack,
)
from windlass.stacks import load_stack

HERE = "here"
"""The name of the machine that this program runs on."""
EVERY_PART: tuple[MachinePart, ...] = get_args(MachinePart)
_LONG_SECONDS = 600.0
"""Predicted time of a run for which compiled code is measured, unless it was. Measuring takes about
40 s on two cores, and compiling a model half of it; compiled steps are 5 to 25 % shorter."""

_ANY_SEQUENCE = 512
"""Tokens of a sequence that head widths are read at; they are the same at every length."""

Progress = Callable[[str, int, int | None], None]
"""Called with a label, the number of items done, and their total (None if it is not known)."""


class ShownMachines(Shown[tuple[tuple[str, Machine], ...]]):
    """A table of machines."""

    def lines(self) -> Iterable[RenderableType]:
        """A row for each machine."""
        if self.value[0][0] != HERE:
            yield f"{HERE}: this machine, not measured yet; `windlass probe` does so"
        yield MachinesTable(self.value)

    def json_tree(self) -> object:
        """What each machine is made of."""
        return [
            {
                "name": name,
                "devices": machine.devices,
                "tiers": machine.device.tiers,
                "peaks": {rate.precision: rate.peak for rate in machine.device.matmul},
                "links": machine.links,
                "execution_model": machine.execution_model,
                "source": machine.source,
            }
            for name, machine in self.value
        ]


def machines() -> Annotated[tuple[tuple[str, Machine], ...], ShownMachines]:
    """List the machines that can be named.

    `NAME:N` is N hosts of a family: `dgx-a100-80gb:8` is 8 hosts of 8 devices.

    Returns:
        Name and machine: this one if measured, added ones, the catalogue's; that beside `NAME:N`
        has as many hosts as it can have.

    Raises:
        InputErrors: a file of the catalogue cannot be read.
    """
    here = load_local_machine(cache_folder())
    entries = [] if here is None else [(HERE, here)]
    added = user_machine_names(_added_folder())
    entries += [(name, find_machine(name)) for name in added]
    for family in host_families():
        largest = load_machine(f"{family.name}:{family.max_count}")
        entries.append((f"{family.name}:N", largest))
        entries += [(size, load_machine(size)) for size in family.named_sizes]
    entries += [(name, load_machine(name)) for name in device_names()]
    return tuple(entries)


def find_stack(name: str | None) -> Stack | None:
    """The software stack of a name or a file; None for Windlass's own runtime.

    Raises:
        StackError: no stack has this name.
        RequestError: the file cannot be read.
        InputErrors: everything that is wrong in the file.
    """
    stack = None if name is None else load_stack(name)
    return None if stack is None or stack.name == OWN_STACK.name else stack


def on_stack(machine: Machine, stack: Stack | None) -> Machine:
    """The machine, driven by a stack."""
    return machine if stack is None else machine.model_copy(update={"stack": stack})


def find_machine(
    name: str, *, progress: Progress | None = None, needs: Collection[MachinePart] = ()
) -> Machine:
    """A machine of the catalogue, or `here`, which is measured on first use.

    Args:
        name: `here`, a name of the catalogue or of a machine that was added, or `NAME:N` for N
            hosts of a family.
        progress: called with how far a measurement is.
        needs: what `here` must have been measured for beside what every plan needs.

    Raises:
        MachineError: the name is unknown, or this machine cannot be measured.
    """
    if name != HERE:
        return load_user_machine(_added_folder(), name) or load_machine(name)
    folder = cache_folder()
    if progress is not None and is_local_machine_changed(folder):
        progress(f"`{folder / LOCAL_MACHINE_FILE}` was changed: measuring anew", 0, None)
    machine = load_local_machine(folder)
    if machine is None or any(part in needs for part in machine.unmeasured):
        machine = _measured(progress, needs)
    # To ask torch takes a second, which a machine without accelerators is spared.
    is_cpu_alone = machine.device.kind == "cpu" and not accelerator_names()
    return machine if is_cpu_alone else _visible_part(machine, progress, needs)


def needed_parts(
    request: Request, graph: Graph, run_seconds: float = 0.0
) -> tuple[MachinePart, ...]:
    """What this machine must have been measured for before a request is planned.

    Args:
        run_seconds: predicted time of the whole run without compiled code.
    """
    compiles = request.compile or (request.compile is None and run_seconds > _LONG_SECONDS)
    needed: dict[MachinePart, bool] = {
        "compiled code": bool(compiles),
        "sparse products": request.sparsity is not None,
        "float16": request.precision == "float16",
    }
    parts = {part for part, is_needed in needed.items() if is_needed} | attention_parts(graph)
    # Where attention is measured in one more way, it is so at the typical width.
    if parts & {"compiled code", "attention without a mask"} or request.attention is not None:
        parts.add(HEAD_PARTS[TYPICAL_HEAD_WIDTH])
    return tuple(part for part in EVERY_PART if part in parts)


def parts_of_plan(plan: Plan, graph: Graph) -> tuple[MachinePart, ...]:
    """What this machine must have been measured for before a plan is predicted for it."""
    sparsity = plan.model.sparsity if plan.model is not None else None
    pins = {name: getattr(plan, name) for name in ("precision", "compile", "attention")}
    return needed_parts(Request().model_copy(update=pins | {"sparsity": sparsity}), graph)


def attention_parts(graph: Graph) -> set[MachinePart]:
    """What a model needs of attention: its head widths or those beside them, and its masks."""
    parts: set[MachinePart] = set()
    for kind in graph.kinds.values():
        for cost in kind.costs:
            ops = [op for op in cost.forward if op.kind == "attention"]
            if any(op.is_causal is False for op in ops):
                parts.add("attention without a mask")
            if ops:
                width = round(head_width(cost, _ANY_SEQUENCE, cost.precision))
                below = max((each for each in HEAD_PARTS if each <= width), default=min(HEAD_PARTS))
                above = min((each for each in HEAD_PARTS if each >= width), default=max(HEAD_PARTS))
                parts |= {HEAD_PARTS[below], HEAD_PARTS[above]}
    return parts


def unmeasured_notes(request: Request, machine: Machine) -> tuple[str, ...]:
    """What was not considered because it was not measured, a sentence."""
    if request.compile is not None or "compiled code" not in machine.unmeasured:
        return ()
    when = f"a run of more than {_LONG_SECONDS / 60:.0f} minutes"
    return (f"compiled code is left out: it is measured for {when}, or by `windlass probe`",)


def _visible_part(
    machine: Machine, progress: Progress | None, needs: Collection[MachinePart]
) -> Machine:
    """This machine with the accelerators that the process sees, which a variable may restrict."""
    from windlass.torch_ext import accelerator_device

    device = accelerator_device()
    is_other = device.kind != machine.device.kind
    if is_other or (device.kind != "cpu" and device.count() > machine.devices):
        return _measured(progress, needs, anew=True)
    return machine if device.kind == "cpu" else machine.with_devices(device.count())


@dataclass(frozen=True, slots=True)
class MachineNumbers(Answer):
    """Every number of a machine with its source."""

    machine: Machine
    numbers: tuple[StatedNumber, ...]

    def lines(self) -> Iterable[RenderableType]:
        """A row for each number."""
        yield numbers_table(self.machine, self.numbers)

    def json_tree(self) -> object:
        """The machine, and its numbers by their paths."""
        names = ("path", "value", "source")
        numbers = [{name: getattr(number, name) for name in names} for number in self.numbers]
        return {"machine": self.machine, "numbers": numbers}


def show_machine(name: str = HERE, *, progress: Watch = None) -> MachineNumbers:
    """Show every number of a machine with its source.

    For example: `windlass machines show dgx-h100:4`.

    Args:
        name: The machine; `here` is this one, and `NAME:N` is N hosts of a family.
        progress: Called with how far a measurement is.

    Raises:
        MachineError: the name is unknown, or this machine cannot be measured.
    """
    machine = find_machine(name, progress=progress)
    return MachineNumbers(machine, tuple(stated_numbers(machine)))


class ShownFile(Shown[Path]):
    """The file of a machine of the user's own."""

    def lines(self) -> Iterable[RenderableType]:
        """The machine, and what to do with its file."""
        machine = find_machine(str(self.value))
        guesses = [each for each in stated_numbers(machine) if each.source.how == "guess"]
        yield machine_table(machine)
        yield (
            f"wrote {self.value}, with {len(guesses)} guesses; `windlass machines show "
            f"{self.value}` lists them, and `windlass plan MODEL --on {self.value}` plans for it"
        )


def write_machine(name: str, *answers: str, ask: Ask = None) -> Annotated[Path, ShownFile]:
    """Write a file for a machine of your own, NAME.toml, from a few answers.

    On a terminal each question that is left open is asked, and Enter takes its default. An answer
    that ends in `?`, and every default, is marked as a guess. The file is used as `--on NAME.toml`.

    For example: `windlass machines new lab device=rtx-4090 devices=4 hosts=2 network=100Gb/s`.

    Args:
        name: Name of the machine, and of its file in this folder.
        answers: Answers as `key=value`: `device` is one of the catalogue, or `other` with `peak`,
            `memory` and `memory_rate`; then `devices`, `hosts`, `link`, `network`, `cards`,
            `oversubscription`, `pod`, `host_memory`.
        ask: Called with each question that they leave open; an empty answer takes the default.

    Raises:
        InputErrors: everything that is wrong with the name and the answers.
        MachineError: there is such a file already.
        StorageError: the file cannot be written.
    """
    given = {key: value for key, _, value in (answer.partition("=") for answer in answers)}
    path = Path(f"{name.removesuffix('.toml')}.toml")
    if path.exists():
        raise MachineError(f"`{path}` exists already; choose another name, or delete it")
    if ask is not None:
        given = _ask_the_rest(path.stem, given, ask)
    machine = new_machine(path.stem, given, datetime.now(UTC).date().isoformat())
    atomic_write(path, machine_text(machine))
    return path


def _ask_the_rest(name: str, given: dict[str, str], ask: Callable[[str], str]) -> dict[str, str]:
    """All answers that are no defaults."""
    device = given.get("device", "").rstrip("?")
    faults = [fault for key in given for fault in answer_faults(key, given[key], device)]
    if fault := name_fault(name):
        faults.append(fault)
    if faults:
        raise InputErrors(faults)
    filled, wrong = dict(given), None
    while (question := next_question(filled)) is not None:
        answer = ask("\n".join(filter(None, (wrong, _prompt(question)))))
        device = filled.get("device", answer).rstrip("?")
        wrong = next(answer_faults(question.key, answer, device), None)
        if not answer and question.default is not None:
            filled[question.key], wrong = question.default, None
        elif wrong is None:
            filled[question.key] = given[question.key] = answer
    return given


def _prompt(question: Question) -> str:
    hint = f" [{question.default}: {question.origin}]" if question.default else ""
    return f"{question.text}{hint}: "


class ShownMachine(Shown[Machine]):
    """What a machine is."""

    def lines(self) -> Iterable[RenderableType]:
        """Its rates, memory and links."""
        yield machine_table(self.value)


class ShownAdded(ShownMachine):
    """A machine that can be named from now on."""

    def lines(self) -> Iterable[RenderableType]:
        """What it is, and how it is used."""
        name = self.value.name
        yield from ShownMachine.lines(self)
        yield f"added `{name}`; `windlass plan MODEL --on {name}` plans for it"


def add_machine(
    file: Path | str, name: str | None = None, *, replace: Flag = False
) -> Annotated[Machine, ShownAdded]:
    """Add the measured machine of a report of `windlass doctor`, so that plans can name it.

    For example: `windlass machines add windlass-doctor.toml`, then `windlass plan MODEL --on NAME`.

    Args:
        file: The report, from this machine or from another one.
        name: Its name in plans; the report's if not given.
        replace: Replace another machine of that name.

    Raises:
        RequestError: the file cannot be read, or is another one.
        InputErrors: everything that is wrong in the file or with the name.
        MachineError: the report has no measured rates, or the name is taken.
        StorageError: the machine cannot be kept.
    """
    machine = machine_of_report(Path(file), name)
    save_user_machine(_added_folder(), machine, replace=replace)
    return machine


def _added_folder() -> Path:
    """Where the machines that a user has added are kept."""
    return data_folder() / "machines"


def probe(*, progress: Watch = None) -> Annotated[Machine, ShownMachine]:
    """Measure all of this machine (about two minutes), and keep the result for this user.

    Args:
        progress: Called with how far the measurement is.

    Raises:
        MachineError: something cannot be measured.
    """
    return _measured(progress, EVERY_PART, anew=True)


def _measured(
    progress: Progress | None, needs: Collection[MachinePart], *, anew: bool = False
) -> Machine:
    """This machine with the parts that are needed; two processes would measure each other."""
    from windlass.hardware import measure_parts, probe_machine

    folder = cache_folder()

    def tell() -> None:
        if progress is not None:
            progress("waiting for another process, which measures this machine", 0, None)

    with one_process(folder / f".{LOCAL_MACHINE_FILE}.lock", tell):
        known = None if anew else load_local_machine(folder)
        if known is None:
            leave = [part for part in EVERY_PART if part not in needs]
            machine = probe_machine(progress, folder, leave=leave)
        else:
            machine = measure_parts(known, needs, progress)
        save_local_machine(folder, machine)
    return machine
