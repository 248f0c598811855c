"""Text from a checkpoint: one token at a time, each from a full forward pass."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from windlass.models.layer_stack import Chain
from windlass.runtime.checkpoint.checkpoint import Checkpoint, load
from windlass.runtime.layer_templates import Template, templates
from windlass.runtime.parameters import LayerTensors, layer_tensors
from windlass.schema.graph import Precision


def generate(
    chain: Chain,
    checkpoint: Checkpoint,
    prompt: Sequence[int],
    *,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    end: int | None = None,
    precision: Precision = "float32",
    device: str = "cpu",
) -> Iterator[int]:
    """Tokens that a trained model writes after a prompt, the same for the same seed.

    Args:
        chain: the model that the checkpoint is of.
        checkpoint: from `checkpoint.latest`.
        prompt: at least one token; only the last ones that the model takes count.
        count: tokens to write.
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: draws among so many likeliest tokens; None among all.
        seed: of the draws.
        end: stops, without giving it, at this token; None goes on to `count`.
        precision: what layers compute in.
        device: torch's name for it.

    Raises:
        CheckpointError: the checkpoint is of another model.
        ValueError: the prompt has no token.
    """
    if not prompt:
        raise ValueError("the prompt has no token")
    where = torch.device(device)
    layers = layer_tensors(chain, seed=0, precision=precision, device=where)
    load(checkpoint, layers, moments=False)
    kinds = templates(chain, compiled=False)
    draws = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = tokens[-chain.max_sequence :] if chain.max_sequence else tokens
        logits = _logits(layers, kinds, torch.tensor([window], device=where))
        token = _draw(logits[0, -1].float().cpu(), temperature, top_k, draws)
        if token == end:
            return
        tokens.append(token)
        yield token


@torch.no_grad()
def _logits(layers: Sequence[LayerTensors], kinds: Sequence[Template], tokens: Tensor) -> Tensor:
    x = tokens
    for layer, template in zip(layers, kinds, strict=True):
        x = template.output(layer.weights, layer.buffers, x)
    return x


def _draw(logits: Tensor, temperature: float, top_k: int | None, draws: torch.Generator) -> int:
    """One token of `Float[v]`."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    chances = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(chances, 1, generator=draws))
