"""Reads the configuration of another engine into a plan, which is then predicted."""

from pathlib import Path

from windlass.atomic_files import read_regular_file
from windlass.engines import EngineFile, load_engine, plan_of_facts, read_engine_config
from windlass.errors import RequestError
from windlass.jobs import NO_OBJECTS, capture, find_machine, on_stack
from windlass.schema import ModelIdentity, Plan
from windlass.stacks import load_stack


def plan_of_config(
    place: Path, engine_name: str, *, model: str | None, machine: str | None
) -> tuple[Plan, tuple[str, ...]]:
    """The plan that a configuration of an engine describes, and what was not read of it.

    Args:
        place: a folder with the engine's files as `export` names them, or its main file.
        engine_name: `ENGINE` or `ENGINE@VERSION`.
        model: the model; None takes the one that the configuration names.
        machine: the machine that it is for.

    Raises:
        RequestError: no such engine, a file cannot be read, or nobody names model and machine.
        PlanError: what it says is no plan for that machine.
    """
    engine = load_engine(engine_name)
    read = read_engine_config(_texts(place, engine), engine)
    named = model or read.facts.get("model.name")
    if not isinstance(named, str) or machine is None:
        missing = "the model before `--from-config`" if machine else "the machine by `--on`"
        raise RequestError(f"`{place}` does not say all that a plan needs; name {missing}")
    identity = ModelIdentity(name=named)
    stack = load_stack(engine.name)
    if capture(identity, NO_OBJECTS, None).experts:
        stack = load_stack("torch")  # no engine takes the costs of experts that `nemo` has yet
    graph = capture(identity, NO_OBJECTS, stack)
    plan = plan_of_facts(
        read.facts, graph, on_stack(find_machine(machine), stack), stack.name, identity
    )
    unread = f"not read: {', '.join(read.unread)}"
    return plan, (unread,) if read.unread else ()


def _texts(place: Path, engine: EngineFile) -> dict[str, str]:
    """The text of each file of a configuration that is there."""
    paths = {name: place / name for name in engine.files}
    if not place.is_dir():
        paths = {engine.main_file: place}
    texts = {}
    for name, path in paths.items():
        try:
            texts[name] = read_regular_file(path).decode()
        except UnicodeDecodeError:
            raise RequestError(f"`{path}` is no text; name the engine's own file") from None
        except OSError as error:
            if name == engine.main_file:
                raise RequestError(
                    f"`{path}` cannot be read: {error.strerror}; `{engine.label}` is configured by "
                    f"{', '.join(f'`{each}`' for each in engine.files)}"
                ) from None
    return texts
