"""Infers shapes by running layers on fake tensors, which have shapes but no memory."""

import bisect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.errors import ModelError
from windlass.models.inspection.layer_kinds import running_statistics

_LONGEST_TRIED = 2**20
LAYER_STACK_HINT = (
    "return an `nn.Sequential` or `nn.ModuleList` of layers: the first takes tokens `[b s]`, the "
    "last gives logits `[b s v]`, every other maps `[b s d]` to `[b s d]`"
)


EXAMPLES_HINT = (
    "return an `nn.Sequential` or `nn.ModuleList` of layers: the first takes inputs of "
    "`model.input_shape` behind a batch dimension, the last gives `[b classes]` or `[b numbers]`"
)
_TOKENS = (2, 4)
"""Batch and sequence of the run on fake tensors."""


class LayerShapes(NamedTuple):
    """What passes between the layers of a model, without the batch."""

    inputs: tuple[torch.Size, ...]
    """Shape of each layer's input; of tokens at a sequence of 4."""
    output: torch.Size
    positions: int
    """Most positions that attention mixes; 1 without attention."""


def infer_layer_shapes(
    model: str,
    layers: Sequence[tuple[str, nn.Module]],
    kinds: Sequence[str],
    examples: tuple[int, ...] | None,
) -> LayerShapes:
    """Shapes of all boundaries between layers, from a run on fake tensors.

    Args:
        kinds: kind of each layer; of layers of one kind and input only the first runs.
        examples: shape of one input; None takes tokens.

    Raises:
        ModelError: a layer does not accept the output of the layer before it.
    """
    outputs: dict[tuple[str, torch.Size], Tensor] = {}
    inputs: list[torch.Size] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _AttentionSizes() as sizes:
        tokens = torch.zeros(_TOKENS, dtype=torch.int64)
        x = tokens if examples is None else torch.zeros(_TOKENS[0], *examples)
        hint = LAYER_STACK_HINT if examples is None else EXAMPLES_HINT
        for (name, layer), kind in zip(layers, kinds, strict=True):
            inputs.append(x.shape[1:])
            key = (kind, x.shape)
            if key not in outputs:
                outputs[key] = _run_layer(model, name, layer, x, hint)
            x = outputs[key]
    _require_output(model, x, examples)
    return LayerShapes(tuple(inputs), x.shape[1:], sizes.positions)


class _AttentionSizes(TorchDispatchMode):
    """Notes how many positions fused attention mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = 1

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  whatever ATen takes and gives
        del types
        if func.overloadpacket.__name__.startswith("_scaled_dot_product_"):
            self.positions = max(self.positions, args[0].shape[-2])
        return func(*args, **(kwargs or {}))


def _require_output(model: str, output: Tensor, examples: tuple[int, ...] | None) -> None:
    """Refuses an output that is no logits."""
    batch, sequence = _TOKENS
    if examples is None and (output.ndim != 3 or output.shape[:2] != _TOKENS):
        raise ModelError(
            f"model `{model}` gives {list(output.shape)} for tokens {list(_TOKENS)}, must give "
            f"[{batch}, {sequence}, vocabulary]; {LAYER_STACK_HINT}"
        )
    if examples is not None and (output.ndim != 2 or output.shape[0] != batch):
        raise ModelError(
            f"model `{model}` gives {list(output.shape)} for inputs {[batch, *examples]}, must "
            f"give [{batch}, classes]; {EXAMPLES_HINT}"
        )


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


def _run_layer(model: str, name: str, layer: nn.Module, x: Tensor, hint: str) -> Tensor:
    try:
        y = functional_call(layer, fake_state(layer), (x,))
    except SystemExit as error:
        raise ModelError(f"layer `{name}` of model `{model}` calls exit; leave it out") from error
    except Exception as error:
        raise ModelError(
            f"layer `{name}` of model `{model}` does not take {list(x.shape)} of "
            f"{x.dtype}: {' '.join(str(error).split())[:300]}; {hint}"
        ) from error
    if not isinstance(y, Tensor):
        raise ModelError(
            f"layer `{name}` of model `{model}` gives a `{type(y).__name__}`, must give "
            f"one tensor; {hint}"
        )
    return y
