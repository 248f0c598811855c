"""What tensor-parallel ranks contribute to the gradients of models of transformers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import multi_threaded_pg

from tiny_transformers import tiny_folder, tiny_input
from windlass.models.build import build_layer_stack
from windlass.models.init_weights import set_parameter
from windlass.models.layer_stack import LayerStack, layer_sharding, materialize_layer
from windlass.models.loss import layer_loss
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import param_shards

FAST = ("olmo2", "deepseek_v3")
SHARDED = (
    *FAST, "arcee", "cohere", "cohere2", "dots1", "ernie4_5", "exaone4", "gemma", "glm", "glm4",
    "glm4_moe", "granite", "granitemoe", "helium", "minimax", "ministral", "nemotron",
    "nemotron_h", "olmo3", "olmoe", "phi", "phi3", "qwen3_next", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip
"""All with a plan for their blocks."""
RANKS = 2


@pytest.fixture
def threads() -> Iterator[None]:
    """Each thread is a rank."""
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    yield
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    multi_threaded_pg._uninstall_threaded_pg()


def gradients(layers: list[nn.Module], stack: LayerStack, x: Tensor) -> dict[str, Tensor]:
    """The gradients of all weights, by their full names."""
    weights = {
        f"{name}.{path}": weight
        for name, layer in zip(stack.names, layers, strict=True)
        for path, weight in layer.named_parameters(remove_duplicate=False)
    }
    y, targets = x, x.roll(-1, 1)
    for layer in layers:
        y = layer(y)
    layer_loss(layers[-1])(y, targets).backward()
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def whole(stack: LayerStack) -> list[nn.Module]:
    layers = [
        materialize_layer(stack, index, seed=0, device="cpu").double()
        for index in range(len(stack.layers))
    ]
    named = dict(zip(stack.names, layers, strict=True))
    for tied, owner in stack.tied_weights.items():
        (user, path), (of, own) = (split(stack, name) for name in (tied, owner))
        set_parameter(named[user], path, named[of].get_parameter(own))
    return layers


def split(stack: LayerStack, full: str) -> tuple[str, str]:
    name = next(name for name in stack.names if full.startswith(f"{name}."))
    return name, full.removeprefix(f"{name}.")


def of_rank(stack: LayerStack, index: int, x: Tensor, store: dist.Store) -> dict[str, Tensor]:
    """One rank's contributions, each in its place of a whole gradient."""
    dist.init_process_group("threaded", rank=index, world_size=RANKS, store=store)
    group = distributed_c10d._get_default_group().group_name
    rank = TensorParallelRank(degree=RANKS, index=index, group_name=group, column_group_name=group)
    layers: list[nn.Module] = []
    shards = {}
    last = len(stack.layers) - 1
    for number, full in enumerate(whole(stack)):
        sharding = layer_sharding(stack, number)
        local = shard_layer(stack.layers[number], sharding, rank, last=number == last)
        for path, shard in param_shards(full, sharding, rank).items():
            part = shard.extract(full.get_parameter(path).detach()).clone()
            set_parameter(local, path, nn.Parameter(part))
            shards[f"{stack.names[number]}.{path}"] = shard
        for path, buffer in full.named_buffers():
            owner, _, leaf = path.rpartition(".")
            setattr(local.get_submodule(owner), leaf, buffer)
        layers.append(local)
    placed = {}
    for name, gradient in gradients(layers, stack, x).items():
        placed[name] = torch.zeros(shards[name].full_shape, dtype=torch.float64)
        shards[name].write_into(placed[name], gradient)
    dist.destroy_process_group()
    return placed


@pytest.mark.parametrize(
    "model_type",
    [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in SHARDED],
)
@pytest.mark.usefixtures("threads")
def test_what_two_ranks_contribute_is_the_whole_gradient(model_type: str, tmp_path: Path):
    name, model = tiny_folder(model_type, tmp_path)
    x = tiny_input(model)
    # Each rank has a stack of its own, as its process has.
    one, *others = (build_layer_stack(name, {}, device="meta") for _ in range(1 + RANKS))
    expected = gradients(whole(one), one, x)
    store = dist.HashStore()
    with ThreadPoolExecutor(RANKS) as pool:
        parts = list(pool.map(of_rank, others, range(RANKS), [x] * RANKS, [store] * RANKS))

    sums = {key: sum(part.get(key, 0) for part in parts) for key in parts[0]}
    for tied, owner in one.tied_weights.items():
        sums[owner] = sums[owner] + sums.pop(tied, 0)
        expected.pop(tied, None)
    assert sums.keys() == expected.keys()
    rounding = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        # Norms and recurrences of transformers compute in float32. A share that lacks or counts
        # twice is far off.
        difference = float((sums[key] - gradient).abs().max())
        assert difference <= 1e-5 * float(gradient.abs().max()) + rounding, key
