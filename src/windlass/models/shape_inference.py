"""Infers shapes by running layers on fake tensors, which have shapes but no memory."""

import bisect
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from windlass.errors import ModelError
from windlass.models.layer_kinds import running_statistics

_LONGEST_TRIED = 2**20
LAYER_STACK_HINT = (
    "return an `nn.Sequential` or `nn.ModuleList` of layers: the first takes tokens `[b s]`, the "
    "last gives logits `[b s v]`, every other maps `[b s d]` to `[b s d]`"
)


def infer_logits_width(
    model: str, layers: Sequence[tuple[str, nn.Module]], kinds: Sequence[str]
) -> int:
    """Width of the last layer's output, from a run of all layers on fake tensors.

    Args:
        model: name of the model, for error messages.
        layers: all layers with their names.
        kinds: kind of each layer; of layers of one kind only the first runs.

    Raises:
        ModelError: a layer does not accept the output of the layer before it.
    """
    outputs: dict[tuple[str, torch.Size], Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.zeros((2, 4), dtype=torch.int64)
        for (name, layer), kind in zip(layers, kinds, strict=True):
            key = (kind, x.shape)
            if key not in outputs:
                outputs[key] = _run_layer(model, name, layer, x)
            x = outputs[key]
    if x.ndim != 3 or x.shape[:2] != (2, 4):
        raise ModelError(
            f"model `{model}` gives {list(x.shape)} for tokens [2, 4], must give "
            f"[2, 4, vocabulary]; {LAYER_STACK_HINT}"
        )
    return x.shape[2]


def infer_max_sequence(layer: nn.Module, vocabulary: int) -> int | None:
    """Rows of the position table: the only one beside the token table; None without such."""
    rows = [module.num_embeddings for module in layer.modules() if isinstance(module, nn.Embedding)]
    if len(rows) != 2 or vocabulary not in rows:
        return None
    rows.remove(vocabulary)
    return rows[0]


def try_sequences(layer: nn.Module) -> int | None:
    """Longest sequence that a first layer takes, by trial on fake tensors; None without a limit."""

    def takes(length: int) -> bool:
        # Torch logs what it cannot broadcast, with a trace, beside raising it.
        log = logging.getLogger(FakeTensorMode.__module__)
        log.addFilter(_drop)
        try:
            return runs(length)
        finally:
            log.removeFilter(_drop)

    def runs(length: int) -> bool:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            tokens = torch.zeros((1, length), dtype=torch.int64, device="cpu")
            try:
                functional_call(layer, fake_state(layer), (tokens,))
            except Exception:  # noqa: BLE001  the user's code may raise anything
                return False
        return True

    if takes(_LONGEST_TRIED):
        return None
    # The first length that it does not take, less one.
    return bisect.bisect_left(range(1, _LONGEST_TRIED), True, key=lambda n: not takes(n)) or None


def _drop(_: logging.LogRecord) -> bool:
    return False


def fake_state(layer: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Parameters and buffers of a layer by name, as fake tensors that claim to be on the CPU.

    Must be called under a `FakeTensorMode`.

    Args:
        layer: a layer on any device.
        dtype: type of floating-point tensors, except running statistics, which keep theirs; None
            keeps the type of each.
    """
    kept = running_statistics(layer)
    state: dict[str, Tensor] = {}
    fakes: dict[int, Tensor] = {}
    parameters = list(layer.named_parameters(remove_duplicate=False))
    for name, tensor in [*parameters, *layer.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in fakes:
            converts = dtype is not None and tensor.is_floating_point() and name not in kept
            fake = torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=dtype if converts else tensor.dtype,
                device="cpu",
            )
            fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
        state[name] = fakes[id(tensor)]
    return state


def _run_layer(model: str, name: str, layer: nn.Module, x: Tensor) -> Tensor:
    try:
        y = functional_call(layer, fake_state(layer), (x,))
    except SystemExit as error:
        raise ModelError(f"layer `{name}` of model `{model}` calls exit; leave it out") from error
    except Exception as error:
        raise ModelError(
            f"layer `{name}` of model `{model}` does not take {list(x.shape)} of "
            f"{x.dtype}: {' '.join(str(error).split())[:300]}; {LAYER_STACK_HINT}"
        ) from error
    if not isinstance(y, Tensor):
        raise ModelError(
            f"layer `{name}` of model `{model}` gives a `{type(y).__name__}`, must give "
            f"one tensor; {LAYER_STACK_HINT}"
        )
    return y
