"""A model from a file of the user's own: `file.py:function`. The file need not know Windlass."""

import contextlib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from windlass.errors import ModelError, did_you_mean


def build_own(name: str, dials: Mapping[str, int | float], *, device: str, seed: int) -> nn.Module:
    """What the named function returns.

    Args:
        name: `file.py:function`.
        dials: keyword arguments for the function.
        device: made torch's default while the function runs.
        seed: torch's generator starts from it while the function runs.

    Raises:
        ModelError: no such file or function, a dial that the function does not take, an error in
            the file, or something returned that is no module.
    """
    place, _, function_name = name.partition(":")
    if not function_name:
        raise ModelError(f"`{name}` names no function; write `{name}:function`")
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ModelError(f"no file `{place}`; `{name}` is read as `file.py:function`")
    with _importable(path.parent):
        with _faults_of(name, path):
            namespace = _load(path)
        function = _function(name, function_name, namespace)
        _check_dials(name, function, dials)
        with _faults_of(name, path), _seeded(seed), torch.device(device):
            module = function(**dials)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"`{name}` returned a `{type(module).__name__}`, must return an `nn.Module`"
        )
    return module


def _load(path: Path) -> Mapping[str, object]:
    """The file's names, run as a module of its own."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    unique = f"{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"`{path}` is no Python file; its name must end in `.py`")
    module = importlib.util.module_from_spec(spec)
    # Data classes and pickling look a module up by its name.
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    return vars(module)


def _function(
    name: str, function_name: str, namespace: Mapping[str, object]
) -> Callable[..., object]:
    function = namespace.get(function_name)
    if not callable(function):
        callables = [key for key, value in namespace.items() if callable(value)]
        raise ModelError(
            f"`{name}`: no function `{function_name}` in the file"
            f"{did_you_mean(function_name, callables)}"
        )
    return function


def _check_dials(
    name: str, function: Callable[..., object], dials: Mapping[str, int | float]
) -> None:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken = set(dials)
    else:
        taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in dials
    ]
    faults = [
        f"it takes no `{dial}`, so `model.{dial}` cannot be set"
        for dial in dials
        if dial not in taken
    ]
    faults += [f"its argument `{name_}` has no default and is not set" for name_ in missing]
    if faults:
        raise ModelError(f"`{name}`: " + "; ".join(faults))


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Lets the file import its neighbours, as it could if it were run as a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draws of the block come from the seed and leave no trace in torch's own generators."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _faults_of(name: str, path: Path) -> Iterator[None]:
    """Turns any error of the user's file into one sentence with its file and line."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        where = _line(error, path)
        text = " ".join(str(error).split()) or "no message"
        raise ModelError(
            f"`{name}` could not be built: {type(error).__name__} at {where}: {text}"
        ) from error


def _line(error: Exception, path: Path) -> str:
    """The innermost line of the user's own file that led to the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == path]
    return f"{path}:{own[-1].lineno}" if own else str(path)
