"""One slice of several, in a process of its own: each layer cut over slices beside the whole one.

Called with rank, number of ranks and folder. Writes for each case how far the slice is from the
whole layer: the largest difference of a tensor over the largest of its values.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack, layer_sharding, layer_stack_from_module
from windlass.models.loss import IGNORE_INDEX
from windlass.models.tensor_parallel.collectives import TensorParallelRank, all_reduce_autograd
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import param_shards
from windlass.runtime.keyed_dropout import DropoutKeys, layer_key, sample_keys
from windlass.runtime.layer_templates import LayerTemplate

SAMPLES, SEQUENCE = 3, 16


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks
    )
    cases = json.loads((folder / "cases.json").read_text())
    shapes = sorted({(case["degree"], case.get("columns", 1)) for case in cases})
    places = {shape: placed(rank, ranks, *shape) for shape in shapes}
    found = {}
    for case in cases:
        if case["degree"] == 2 and case.get("compiled", False) != (rank < 2):
            continue
        place = places[case["degree"], case.get("columns", 1)]
        found[case["name"]] = compared(case, place)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def placed(rank: int, ranks: int, degree: int, columns: int) -> TensorParallelRank:
    """This rank's place among as many slices, of as many such sets as there are ranks for."""
    names = ["", "", ""]
    for first in range(0, ranks, degree):
        members = [first + at for at in range(degree)]
        rows = [members[at : at + columns] for at in range(0, degree, columns)]
        rings = [[members], [list(column) for column in zip(*rows, strict=True)], rows]
        for at, several in enumerate(rings if columns > 1 else rings[:1]):
            for ring in several:
                group = dist.new_group(ring)
                names[at] = group.group_name if rank in ring else names[at]
    return TensorParallelRank(
        degree=degree, index=rank % degree, columns=columns, group_name=names[0],
        column_group_name=names[1], row_group_name=names[2],
    )  # fmt: skip


def compared(case: dict, place: TensorParallelRank) -> dict[str, float]:
    """How far a slice is from the whole, for each layer of a case's chain that is asked for."""
    dtype = getattr(torch, case["dtype"])
    torch.manual_seed(1)
    chain = built(case)
    for layer in chain.layers:
        for parameter in layer.parameters():
            # Biases that start as zeros would prove nothing.
            nn.init.normal_(parameter, std=0.3)
    chain = replace(chain, layers=tuple(layer.to(dtype) for layer in chain.layers))
    apart: dict[str, float] = {}
    for index in case.get("layers") or range(len(chain.layers)):
        apart |= compared_layer(chain, index, place, compiled=case.get("compiled", False))
    return apart


def compared_layer(
    chain: LayerStack, index: int, place: TensorParallelRank, *, compiled: bool
) -> dict[str, float]:
    layer, name, last = chain.layers[index], chain.names[index], index == len(chain.layers) - 1
    dtype = next(layer.parameters()).dtype
    draw = torch.Generator().manual_seed(index)
    width = layer_width(chain)
    x = torch.randn(SAMPLES, SEQUENCE, width, generator=draw, dtype=dtype)
    tokens = torch.randint(chain.vocabulary, (SAMPLES, SEQUENCE), generator=draw)
    targets = None
    if last:
        targets = torch.randint(chain.vocabulary, (SAMPLES, SEQUENCE), generator=draw)
        targets[0, :5] = IGNORE_INDEX
    handed = torch.randn(SAMPLES, SEQUENCE, width, generator=draw, dtype=dtype)

    cuts = layer_sharding(chain, index)
    parts = param_shards(layer, cuts, place)
    weights = [p.detach() for p in layer.parameters()]
    whole = LayerTemplate(layer, last=last, compiled=False)
    twin = LayerTemplate(shard_layer(layer, cuts, place, last=last), last=last, compiled=compiled)
    own_weights = [parts[path].extract(w) for path, w in zip(twin.parameters, weights, strict=True)]
    if index == 0:
        given = own_given = tokens
    else:
        given, own_given = x, own(x, place)
    out, gradients = passed(
        whole, weights, name, given, targets, torch.ones(()) if last else handed
    )
    own_handed = torch.ones(()) if last else own(handed, place)
    own_out, own_gradients = passed(twin, own_weights, name, own_given, targets, own_handed)

    apart = {f"{name} output": distance(own_out, out if last else own(out, place))}
    if index > 0:
        apart[f"{name} input"] = distance(own_gradients.pop(), own(gradients.pop(), place))
    for path, part, gradient in zip(twin.parameters, own_gradients, gradients, strict=True):
        piece, mine = parts[path], part.to_dense()
        if piece.replicated_over is not None:
            mine = all_reduce_autograd(mine, getattr(place, piece.replicated_over))
        apart[f"{name}.{path}"] = distance(mine, piece.extract(gradient.to_dense()))
    return apart


def passed(
    template: LayerTemplate, weights: list[Tensor], name: str, x: Tensor, targets: Tensor | None,
    handed: Tensor,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Output, and gradients of weights and, last, of an input that is no tokens."""
    wanted = [w.detach().clone().requires_grad_() for w in weights]
    keys = DropoutKeys(
        samples=sample_keys(0, 1, 0, SAMPLES),
        layer=layer_key(name),
        active=torch.ones((), dtype=torch.int64),
    )
    if x.is_floating_point():
        x = x.detach().clone().requires_grad_()
        wanted.append(x)
    keyed = keys if template.has_dropout else None
    out = template(wanted[: len(weights)], [], keyed, x, targets, seed=0)
    gradients = torch.autograd.grad(out, wanted, handed.to(out.dtype))
    return out.detach(), [g.detach() for g in gradients]


def own(x: Tensor, place: TensorParallelRank) -> Tensor:
    return x.chunk(place.rows, dim=1)[place.row].chunk(place.columns, dim=-1)[place.column]


def distance(mine: Tensor, theirs: Tensor) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    apart, largest = (mine - theirs).abs().max(), theirs.abs().max()
    return float(apart / largest if largest else apart)


def layer_width(chain: LayerStack) -> int:
    return next(m.weight.shape[1] for m in chain.layers[0].modules() if isinstance(m, nn.Embedding))


def built(case: dict) -> LayerStack:
    if case["model"] != "own":
        return build_layer_stack(case["model"], case["dials"], device="cpu", seed=1)
    return layer_stack_from_module(own_model(), "own", sharding_rules=case["cuts"])


class Mixing(nn.Module):
    """Attention and feed-forward as a user might write them: fused projection, heads counted."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.attention = Mixer(width, heads)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(2 * width, width),
            nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(hidden=self.norm(x))[0]
        return x + self.feed(x)


class Mixer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        b, s, _ = hidden.shape
        q, k, v = self.mixed(hidden).chunk(3, dim=-1)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, s, -1)), None


class Start(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width, padding_idx=3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def own_model() -> nn.Sequential:
    return nn.Sequential(Start(33, 16), Mixing(16, 4), Mixing(16, 4), nn.Linear(16, 33))


if __name__ == "__main__":
    main()
