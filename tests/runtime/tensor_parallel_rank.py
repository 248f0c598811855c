"""Tensor-parallel ranks in processes of their own: each sharded layer beside the full one.

Called with number of ranks and folder; torch is imported once, then the ranks are forked. Each
writes for each case the largest error of each tensor
of this rank, relative to the largest value of the full layer's tensor.
"""

import json
import os
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forked_runs import share_imports
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack, layer_sharding, layer_stack_from_module
from windlass.models.loss import IGNORE_INDEX
from windlass.models.sentences import has_sentence_head
from windlass.models.tensor_parallel.collectives import TensorParallelRank, all_reduce_autograd
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import param_shards
from windlass.runtime.keyed_dropout import DropoutKeys, layer_key, sample_keys
from windlass.runtime.layer_templates import LayerTemplate
from windlass.schema import LoraRequest, SparsityRequest

SAMPLES, SEQUENCE = 3, 16


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world_size, folder = int(sys.argv[1]), Path(sys.argv[2])
    share_imports("torch._dynamo")  # by the first collective within a layer
    for rank in range(world_size):
        if os.fork() == 0:
            try:
                run_rank(rank, world_size, folder)
            except BaseException:  # noqa: BLE001  a forked process must not return
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    for _ in range(world_size):
        if os.wait()[1] != 0:
            os.killpg(0, signal.SIGKILL)  # the others would wait for it


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Writes the errors of all cases that a rank takes part in."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size
    )
    cases = json.loads((folder / "cases.json").read_text())
    shapes = sorted({(case["degree"], case.get("columns", 1)) for case in cases})
    tp_ranks = {shape: make_tp_rank(rank, world_size, *shape) for shape in shapes}
    errors = {}
    for case in cases:
        if case["degree"] == 2 and case.get("compiled", False) != (rank < 2):
            continue
        tp_rank = tp_ranks[case["degree"], case.get("columns", 1)]
        errors[case["name"]] = case_errors(case, tp_rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(errors))
    dist.barrier()
    dist.destroy_process_group()


def make_tp_rank(rank: int, world_size: int, degree: int, columns: int) -> TensorParallelRank:
    """This process as a tensor-parallel rank; the processes form `world_size / degree` groups."""
    names = ["", "", ""]
    for first in range(0, world_size, degree):
        members = [first + offset for offset in range(degree)]
        rows = [members[start : start + columns] for start in range(0, degree, columns)]
        columns_of_ranks = [list(column) for column in zip(*rows, strict=True)]
        groups_by_axis = [[members], columns_of_ranks, rows]
        for axis, groups in enumerate(groups_by_axis if columns > 1 else groups_by_axis[:1]):
            for ranks in groups:
                group = dist.new_group(ranks)
                names[axis] = group.group_name if rank in ranks else names[axis]
    return TensorParallelRank(
        degree=degree, index=rank % degree, columns=columns, group_name=names[0],
        column_group_name=names[1], row_group_name=names[2],
    )  # fmt: skip


def case_errors(case: dict, tp_rank: TensorParallelRank) -> dict[str, float]:
    """Error of each tensor, for the layers of a case."""
    dtype = getattr(torch, case["dtype"])
    torch.manual_seed(1)
    stack = build_stack(case)
    for layer in stack.layers:
        for parameter in layer.parameters():
            # Biases that start as zeros would prove nothing.
            nn.init.normal_(parameter, std=0.3)
    stack = replace(stack, layers=tuple(layer.to(dtype) for layer in stack.layers))
    errors: dict[str, float] = {}
    for index in case.get("layers") or range(len(stack.layers)):
        errors |= layer_errors(stack, index, tp_rank, compiled=case.get("compiled", False))
    return errors


def layer_errors(
    stack: LayerStack, index: int, tp_rank: TensorParallelRank, *, compiled: bool
) -> dict[str, float]:
    """Error of each tensor of one layer."""
    layer, name, last = stack.layers[index], stack.names[index], index == len(stack.layers) - 1
    dtype = next(layer.parameters()).dtype
    generator = torch.Generator().manual_seed(index)
    width = layer_width(stack)
    x = torch.randn(SAMPLES, SEQUENCE, width, generator=generator, dtype=dtype)
    tokens = torch.randint(stack.vocabulary, (SAMPLES, SEQUENCE), generator=generator)
    targets = None
    if last:
        targets = torch.randint(stack.vocabulary, (SAMPLES, SEQUENCE), generator=generator)
        targets[0, :5] = IGNORE_INDEX
    loss_gradient, documents = torch.ones(()), None
    if has_sentence_head(stack.layers[-1]):
        tokens += stack.vocabulary * torch.randint(2, tokens.shape, generator=generator)
        # Two documents and the fill behind them; of the last row the fill is the second one.
        documents = torch.tensor(
            [[0] * 5 + [1] * 7 + [2] * 4] * (SAMPLES - 1) + [[0] * 9 + [1] * 7]
        )
        loss_gradient = torch.tensor([1.0, 0.7, 0.0])
        sentences = torch.tensor([[0, 1, IGNORE_INDEX]] * (SAMPLES - 1) + [[1, IGNORE_INDEX, -100]])
        targets = torch.cat((targets, sentences), dim=1) if targets is not None else None
    output_gradient = torch.randn(SAMPLES, SEQUENCE, width, generator=generator, dtype=dtype)

    sharding = layer_sharding(stack, index)
    shards = param_shards(layer, sharding, tp_rank)
    weights = [p.detach() for p in layer.parameters()]
    buffers = list(layer.buffers())  # every rank has all of a mask
    full = LayerTemplate(layer, last=last, compiled=False)
    sharded_layer = shard_layer(layer, sharding, tp_rank, last=last)
    sharded = LayerTemplate(sharded_layer, last=last, compiled=compiled)
    pairs = zip(sharded.parameters, weights, strict=True)
    local_weights = [shards[path].extract(weight) for path, weight in pairs]
    inputs, local_inputs = (tokens, tokens) if index == 0 else (x, local_part(x, tp_rank))
    out, gradients = forward_backward(
        full, weights, buffers, name, inputs, targets, loss_gradient if last else output_gradient,
        documents,
    )  # fmt: skip
    local_gradient = loss_gradient if last else local_part(output_gradient, tp_rank)
    local_out, local_gradients = forward_backward(
        sharded, local_weights, buffers, name, local_inputs, targets, local_gradient, documents
    )

    errors = {f"{name} output": error(local_out, out if last else local_part(out, tp_rank))}
    if index > 0:
        expected = local_part(gradients.pop(), tp_rank)
        errors[f"{name} input"] = error(local_gradients.pop(), expected)
    groups = {
        "all": tp_rank.all_group, "tokens": tp_rank.token_group, "features": tp_rank.feature_group,
    }  # fmt: skip
    for path, local, gradient in zip(sharded.parameters, local_gradients, gradients, strict=True):
        shard, actual = shards[path], local.to_dense()
        if shard.replicated_over is not None:
            actual = all_reduce_autograd(actual, groups[shard.replicated_over])
        errors[f"{name}.{path}"] = error(actual, shard.extract(gradient.to_dense()))
    return errors


def forward_backward(
    template: LayerTemplate, weights: list[Tensor], buffers: list[Tensor], name: str, x: Tensor,
    targets: Tensor | None, output_gradient: Tensor, documents: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Output, and gradients of the weights and of the input, last, unless it is tokens."""
    wanted = [w.detach().clone().requires_grad_() for w in weights]
    keys = DropoutKeys(
        samples=sample_keys(0, 1, 0, SAMPLES),
        layer=layer_key(name),
        active=torch.ones((), dtype=torch.int64),
    )
    if x.is_floating_point():
        x = x.detach().clone().requires_grad_()
        wanted.append(x)
    keys_if_dropout = keys if template.has_dropout else None
    out = template(wanted[: len(weights)], buffers, keys_if_dropout, x, targets, documents, seed=0)
    gradients = torch.autograd.grad(out, wanted, output_gradient.to(out.dtype))
    return out.detach(), [g.detach() for g in gradients]


def local_part(x: Tensor, tp_rank: TensorParallelRank) -> Tensor:
    rows = x.chunk(tp_rank.rows, dim=1)[tp_rank.row]
    return rows.chunk(tp_rank.columns, dim=-1)[tp_rank.column]


def error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    difference, largest = (actual - expected).abs().max(), expected.abs().max()
    return float(difference / largest if largest else difference)


def layer_width(stack: LayerStack) -> int:
    return next(m.weight.shape[1] for m in stack.layers[0].modules() if isinstance(m, nn.Embedding))


def build_stack(case: dict) -> LayerStack:
    if case["model"] != "own":
        settings = case.get("sparsity")
        sparsity = SparsityRequest(**settings) if settings else None
        lora = LoraRequest(**case["lora"]) if "lora" in case else None
        return build_layer_stack(
            case["model"], case["dials"], device="cpu", seed=1, sparsity=sparsity, lora=lora
        )
    return layer_stack_from_module(own_model(), "own", sharding_rules=case["sharding_rules"])


class Block(nn.Module):
    """Attention and feed-forward as a user might write them: fused projection, heads counted."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(2 * width, width),
            nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(hidden=self.norm(x))[0]
        return x + self.feed(x)


class Attention(nn.Module):
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
    return nn.Sequential(Start(33, 16), Block(16, 4), Block(16, 4), nn.Linear(16, 33))


if __name__ == "__main__":
    main()
