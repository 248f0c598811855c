"""Real weights for modules on the meta device, each drawn from (seed, name) and nothing else."""

import copy
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from windlass.errors import ModelError


def drawn(module: nn.Module, name: str, seed: int) -> nn.Module:
    """A copy of `module` on the CPU whose weights come from (seed, name).

    Each submodule that owns tensors draws them by its own `reset_parameters`, from a generator
    keyed by the seed and the submodule's full name.

    Args:
        module: on the meta device; stays as it is.
        name: its full name in the model.
        seed: of all weights of the model.

    Raises:
        ModelError: a submodule owns tensors and has no `reset_parameters`.
    """
    real = copy.deepcopy(module).to_empty(device="cpu")
    for path, part in real.named_modules():
        if not any(True for _ in state_of(part, recurse=False)):
            continue
        full = ".".join(filter(None, (name, path)))
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            raise ModelError(
                f"`{full}`, a `{type(part).__name__}`, has no `reset_parameters`, so its weights "
                "cannot be drawn alone; give it one, or build the whole model on the CPU"
            )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_key(seed, full))
            reset()
    return real


def weightless(layer: nn.Module) -> nn.Module:
    """A copy of a layer on the meta device, in training, made without copying its weights."""
    tensors = [*layer.parameters(), *layer.buffers()]
    memo: dict[int, object] = {}
    for tensor in tensors:
        bare = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(bare) if isinstance(tensor, nn.Parameter) else bare
    copied: nn.Module = copy.deepcopy(layer, memo)
    return copied.train()


def put_parameter(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    """Makes `parameter` the one that stands at `path` (dots between names) in `module`."""
    holder, _, leaf = path.rpartition(".")
    module.get_submodule(holder).register_parameter(leaf, parameter)


def state_of(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    """All tensors that a module owns: parameters and buffers."""
    yield from module.parameters(recurse=recurse)
    yield from module.buffers(recurse=recurse)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
