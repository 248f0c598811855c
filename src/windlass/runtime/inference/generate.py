"""Text generation from a checkpoint: one token at a time, each from a full forward pass."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.models import LayerStack
from windlass.runtime.checkpoint.checkpoint import Checkpoint, load_checkpoint
from windlass.runtime.layer_templates import layer_templates
from windlass.runtime.parameters import resident_layers
from windlass.schema import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How many tokens to generate, and how to draw them."""

    count: int
    """Number of tokens to generate at most."""
    temperature: float = 1.0
    """Divisor of the logits; 0 always takes the most likely token."""
    top_k: int | None = None
    """Number of most likely tokens to draw from; None draws from all."""
    seed: int = 0
    """Seed of the draws."""
    end_token: int | None = None
    """Token that ends the text and is not returned; None always generates `count` tokens."""


def generate_text(
    stack: LayerStack,
    checkpoint: Checkpoint,
    prompt: Sequence[int],
    options: SamplingOptions,
    *,
    precision: Precision = "float32",
    device: str = "cpu",
) -> Iterator[int]:
    """Tokens that a trained model writes after a prompt, the same for the same seed.

    Args:
        stack: the model that the checkpoint belongs to.
        checkpoint: checkpoint to load the weights from.
        prompt: at least one token; only as many of the last ones count as the model accepts.
        options: number of tokens, and how they are drawn.
        precision: precision that layers compute in.
        device: torch device name.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
        ValueError: the prompt has no token.
    """
    if not prompt:
        raise ValueError("the prompt has no token")
    logits_of = checkpoint_logits(stack, checkpoint, precision=precision, device=device)
    generator = torch.Generator().manual_seed(options.seed)
    tokens = list(prompt)
    for _ in range(options.count):
        window = tokens[-stack.max_sequence :] if stack.max_sequence else tokens
        logits = logits_of(torch.tensor([window]))
        token = _draw(logits[0, -1].float().cpu(), options, generator)
        if token == options.end_token:
            return
        tokens.append(token)
        yield token


def checkpoint_logits(
    stack: LayerStack, checkpoint: Checkpoint, *, precision: Precision, device: str
) -> Callable[[Tensor], Tensor]:
    """The function that gives logits `Float[b s v]` for tokens `Int[b s]`, without dropout.

    Args:
        stack: the model that the checkpoint belongs to.
        checkpoint: checkpoint to load the weights from.
        precision: precision that layers compute in.
        device: torch device name; tokens may be on any device.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    torch_device = torch.device(device)
    layers = resident_layers(stack, seed=0, precision=precision, device=torch_device)
    load_checkpoint(checkpoint, layers, moments=False)
    templates = layer_templates(stack, compiled=False)

    @torch.no_grad()
    def logits_of(tokens: Tensor) -> Tensor:
        x = tokens.to(torch_device)
        for layer, template in zip(layers, templates, strict=True):
            x = template.raw_output(layer.weights, layer.buffers, x)
        return x

    return logits_of


def _draw(logits: Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    """A token drawn from logits `Float[v]`."""
    if options.temperature == 0:
        return int(logits.argmax())
    if options.top_k is not None and options.top_k < len(logits):
        threshold = logits.topk(options.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    probabilities = torch.softmax(logits / options.temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
