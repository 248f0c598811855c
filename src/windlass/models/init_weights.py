"""Draws weights for modules on the meta device, each from (seed, parameter name) alone."""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from windlass.errors import ModelError


def init_from_seed(
    module: nn.Module,
    name: str,
    seed: int,
    *,
    empty: Collection[str] = (),
    draw: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """A copy of `module` on the CPU whose weights depend only on (seed, name).

    Each submodule that owns tensors draws them with its own `reset_parameters`, from a generator
    keyed by the seed and the submodule's full name.

    Args:
        module: a module on the meta device, which is not changed.
        empty: names of parameters that become empty tensors, because they are another layer's.
        draw: draws the weights of one submodule; None calls its `reset_parameters`.

    Raises:
        ModelError: a submodule owns tensors and has no `reset_parameters`.
    """
    real = copy.deepcopy(module)
    for path, submodule in real.named_modules():
        names = [
            ".".join(filter(None, (path, leaf)))
            for leaf, _ in submodule.named_parameters(recurse=False)
        ]
        buffers = any(True for _ in submodule.buffers(recurse=False))
        if not names and not buffers:
            continue
        if not buffers and all(each in empty for each in names):
            _replace_by_empty(real, names)
            continue
        key = full_name = ".".join(filter(None, (name, path)))
        method = "reset_parameters"
        beside = {".".join(filter(None, (path, leaf))) for leaf in _adapter_names(submodule)}
        if beside and not buffers and {*names} - beside <= {*empty}:
            # The base is read, and drawing it would take longer than reading it.
            _replace_by_empty(real, [each for each in names if each in empty])
            key, method = f"{full_name}.lora", "reset_adapter"
        kept = [each for each in submodule.named_buffers(recurse=False) if not each[1].is_meta]
        submodule.to_empty(device="cpu", recurse=False)
        reset = getattr(submodule, method, None)
        if draw is not None and method == "reset_parameters":
            reset = partial(draw, submodule)
        if reset is None:
            raise ModelError(
                f"`{full_name}`, a `{type(submodule).__name__}`, has no `reset_parameters`, so its "
                "weights cannot be drawn alone; give it one, or build the whole model on the CPU"
            )
        with keyed_generator(seed, key):
            reset()
        for leaf, buffer in kept:  # computed already
            submodule.get_buffer(leaf).copy_(buffer)
        _replace_by_empty(real, [each for each in names if each in empty])
    return real


def _adapter_names(module: nn.Module) -> Collection[str]:
    """Names of the factors of the adapter in a module, which `reset_adapter` draws alone."""
    names: Collection[str] = getattr(module, "adapter_names", ())
    return names


@contextlib.contextmanager
def keyed_generator(seed: int, name: str) -> Iterator[None]:
    """Lets torch's CPU generator depend on (seed, name) alone for the block."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest, "little"))
        yield


def _replace_by_empty(module: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        set_parameter(module, name, nn.Parameter(torch.empty(0)))


def meta_copy(layer: nn.Module) -> nn.Module:
    """A copy of a layer on the meta device in training mode, made without copying its weights."""
    memo: dict[int, object] = {}
    for tensor in (*layer.parameters(), *layer.buffers()):
        bare = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
    copied: nn.Module = copy.deepcopy(layer, memo)
    return copied.train()


def set_parameter(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    """Replaces the parameter at `path` (dots between names) inside `module`."""
    owner, _, leaf = path.rpartition(".")
    module.get_submodule(owner).register_parameter(leaf, parameter)


def parameters_and_buffers(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    """All tensors that a module owns."""
    yield from module.parameters(recurse=recurse)
    yield from module.buffers(recurse=recurse)
