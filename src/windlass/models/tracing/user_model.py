"""Builds a model from `file.py:function`; the file does not need to import Windlass."""

import contextlib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from windlass.errors import ModelError, did_you_mean
from windlass.models.catalog import ModelArgument
from windlass.models.images.resnet import widen_batch_norms
from windlass.schema import meant_sizes


def build_user_model(
    name: str, arguments: Mapping[str, ModelArgument], *, device: str, seed: int
) -> nn.Module:
    """Calls a function of a user's file and returns the module it builds.

    Args:
        name: `file.py:function`.
        seed: seed of torch's generator while the function runs.

    Raises:
        ModelError: the file or function does not exist, the function does not accept an argument,
            the file raises an error, or the function does not return a module.
    """
    file_name, _, function_name = name.partition(":")
    if not function_name:
        raise ModelError(f"`{name}` names no function; write `{name}:function`")
    path = Path(file_name).expanduser().resolve()
    if not path.is_file():
        raise ModelError(f"no file `{file_name}`; `{name}` is read as `file.py:function`")
    with _on_search_path(path.parent):
        with _errors_located(name, path):
            namespace = _load(path)
        function = _find_function(name, function_name, namespace)
        return call_model_function(name, function, arguments, path, device=device, seed=seed)


def call_model_function(
    name: str,
    function: Callable[..., object],
    arguments: Mapping[str, ModelArgument],
    path: Path,
    *,
    device: str,
    seed: int,
) -> nn.Module:
    """Calls a function and returns the module it builds.

    Args:
        seed: seed of torch's generator while the function runs.

    Raises:
        ModelError: the function does not accept an argument, raises an error, or does not return a
            module.
    """
    keywords = _keywords(name, function, arguments)
    with _errors_located(name, path), _seeded(seed), torch.device(device):
        module = function(**keywords)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"`{name}` returned a `{type(module).__name__}`, must return an `nn.Module`"
        )
    widen_batch_norms(module)
    return module


def _load(path: Path) -> Mapping[str, object]:
    """Runs the file as a module and returns its namespace."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    unique = f"{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"`{path}` is not a Python file; its name must end in `.py`")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a module up by its name.
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    return vars(module)


def _find_function(
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


def _keywords(
    name: str, function: Callable[..., object], arguments: Mapping[str, ModelArgument]
) -> dict[str, ModelArgument]:
    """The arguments by the names that a function has for them: `layers` may be its `n_layer`."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = [p.name for p in parameters if p.kind in kinds]
    keywords: dict[str, ModelArgument] = {}
    errors = []
    for key, value in arguments.items():
        meant = [key] if key in accepted else _same_size(key, accepted)
        if len(meant) > 1:
            errors.append(f"`model.{key}` may be its {' or its '.join(f'`{m}`' for m in meant)}")
        elif meant and meant[0] in (*keywords, *arguments) and meant[0] != key:
            errors.append(f"`model.{key}` is its `{meant[0]}`, which is set by another key")
        elif meant or takes_any:
            keywords[meant[0] if meant else key] = value
        else:
            errors.append(
                f"it takes no `{key}`, so `model.{key}` cannot be set{_way_out(key, accepted)}"
            )
    errors += [
        f"its argument `{p.name}` has no default and is not set; set `model.{p.name}`"
        for p in parameters
        if p.default is p.empty and p.kind in kinds and p.name not in keywords
    ]
    if errors:
        raise ModelError(f"`{name}`: " + "; ".join(errors))
    return keywords


def _same_size(key: str, accepted: Sequence[str]) -> list[str]:
    """The arguments whose names mean the same size of a model."""
    sizes = meant_sizes(key)
    return [each for each in accepted if sizes & meant_sizes(each)]


def _way_out(key: str, accepted: Sequence[str]) -> str:
    takes = ", ".join(f"`{each}`" for each in accepted)
    return did_you_mean(key, accepted) or (f"; it takes {takes}" if takes else "")


@contextlib.contextmanager
def _on_search_path(folder: Path) -> Iterator[None]:
    """Lets the file import modules beside it, as if it were run as a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch's generators for the block and restores their state afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _errors_located(name: str, path: Path) -> Iterator[None]:
    """Turns any error of the user's file into a `ModelError` with file and line."""
    try:
        yield
    except ModelError:
        raise
    except SystemExit as error:
        raise ModelError(
            f"`{name}` calls exit at {_location(error, path)}; its file should only define a model"
        ) from error
    except Exception as error:
        location = _location(error, path)
        text = " ".join(str(error).split()) or "no message"
        raise ModelError(
            f"`{name}` could not be built: {type(error).__name__} at {location}: {text}"
        ) from error


def _location(error: BaseException, path: Path) -> str:
    """File and line, the innermost in the user's file, that led to the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if Path(frame.filename) == path]
    return f"{path}:{in_file[-1].lineno}" if in_file else str(path)
