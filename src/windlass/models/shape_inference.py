"""Trial runs of layers on tensors that have shapes but no memory behind them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from windlass.errors import ModelError

WAY_OUT = (
    "return an `nn.Sequential` or `nn.ModuleList` of layers: the first takes tokens `[b s]`, the "
    "last gives logits `[b s v]`, every other maps `[b s d]` to `[b s d]`"
)


def logits_width(model: str, layers: Sequence[tuple[str, nn.Module]], kinds: Sequence[str]) -> int:
    """Width of the last layer's output, by a run of the whole chain on tensors without memory.

    Args:
        model: its name, for messages.
        layers: all, each with its name.
        kinds: of each layer; equal layers run once.

    Raises:
        ModelError: a layer does not take what the layer before it gives.
    """
    known: dict[tuple[str, torch.Size], Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.zeros((2, 4), dtype=torch.int64)
        for (name, layer), kind in zip(layers, kinds, strict=True):
            if (kind, x.shape) not in known:
                known[kind, x.shape] = _call(model, name, layer, x)
            x = known[kind, x.shape]
    if x.ndim != 3 or x.shape[:2] != (2, 4):
        raise ModelError(
            f"model `{model}` gives {list(x.shape)} for tokens [2, 4], must give "
            f"[2, 4, vocabulary]; {WAY_OUT}"
        )
    return x.shape[2]


def position_rows(layer: nn.Module, vocabulary: int) -> int | None:
    """Rows of the table beside the tokens' own, if the first layer has exactly one such."""
    rows = [part.num_embeddings for part in layer.modules() if isinstance(part, nn.Embedding)]
    if len(rows) != 2 or vocabulary not in rows:
        return None
    rows.remove(vocabulary)
    return rows[0]


def fake_state(layer: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Parameters and buffers of a layer, by name, without memory behind them.

    To be called under a `FakeTensorMode`; the tensors say they are on the CPU.

    Args:
        layer: on any device.
        dtype: of floating-point tensors; None leaves each as it is.
    """
    state: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    learned = list(layer.named_parameters(remove_duplicate=False))
    for name, tensor in [*learned, *layer.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
            made[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
        state[name] = made[id(tensor)]
    return state


def _call(model: str, name: str, layer: nn.Module, x: Tensor) -> Tensor:
    try:
        y = functional_call(layer, fake_state(layer), (x,))
    except Exception as error:
        raise ModelError(
            f"layer `{name}` of model `{model}` does not take {list(x.shape)} of "
            f"{x.dtype}: {' '.join(str(error).split())[:300]}; {WAY_OUT}"
        ) from error
    if not isinstance(y, Tensor):
        raise ModelError(
            f"layer `{name}` of model `{model}` gives a `{type(y).__name__}`, must give "
            f"one tensor; {WAY_OUT}"
        )
    return y
