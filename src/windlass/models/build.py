"""Builds a chain by name: of the catalogue, or of a file of the user's own."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from windlass.errors import ModelError, did_you_mean
from windlass.models import catalog as catalogue
from windlass.models.config import TransformerShape
from windlass.models.init_weights import put_parameter
from windlass.models.layer_stack import Chain, chain_of, materialise
from windlass.models.transformer import transformer
from windlass.models.user_model import build_own

DIALS = (
    "layers", "width", "heads", "kv_heads", "hidden", "vocabulary", "sequence", "dropout",
    "halves",
)  # fmt: skip
_COUNTS = frozenset(DIALS) - {"dropout", "halves"}


def build_chain(
    name: str,
    dials: Mapping[str, int | float],
    *,
    device: str,
    seed: int = 0,
    cuts: Mapping[str, str] | None = None,
) -> Chain:
    """The chain of layers of a model.

    Args:
        name: of the catalogue, or `file.py:function` for a function that returns an `nn.Module`.
        dials: what to change of its shape; of a file, the keyword arguments of the function.
        device: `meta` allocates no weights; on any other they are drawn from the seed, the
            catalogue's models each parameter from (seed, its name) alone.
        seed: of all weights.
        cuts: rules of cutting by pattern of module names, as `read_cut` reads them, beyond what the
            catalogue's models know themselves.

    Raises:
        ModelError: unknown model, dials or rules that do not fit it, or no chain of layers.
    """
    if ":" in name or name.endswith(".py"):
        return chain_of(build_own(name, dials, device=device, seed=seed), name, cuts=cuts)
    shape = turned(catalogue.shape(name), dials)
    with torch.device("meta"):
        module = transformer(shape)
    chain = chain_of(
        module, name, vocabulary=shape.vocabulary, max_sequence=shape.sequence, cuts=cuts
    )
    return chain if device == "meta" else _with_weights(chain, seed=seed, device=device)


def turned(shape: TransformerShape, dials: Mapping[str, int | float]) -> TransformerShape:
    """The shape after its dials are turned.

    What follows from another dial goes with it: the hidden width keeps its ratio to the width, the
    rotary part its share of a head, and key heads stay one to a query head if they were.

    Raises:
        ModelError: all that does not go together, at once.
    """
    faults = [
        f"unknown dial `{dial}`{did_you_mean(dial, DIALS)}" for dial in dials if dial not in DIALS
    ]
    known = {dial: value for dial, value in dials.items() if dial in DIALS}
    changes: dict[str, int | float] = {
        dial: int(value) if dial in _COUNTS else value for dial, value in known.items()
    }
    new = replace(shape, **changes)  # type: ignore[arg-type]  # counts are whole
    if "hidden" not in known:
        new = replace(new, hidden=round(shape.hidden * new.width / shape.width))
    if "kv_heads" not in known and shape.key_heads == shape.heads:
        new = replace(new, key_heads=new.heads)
    if shape.rotary_width is not None and new.heads > 0:
        share = shape.rotary_width / shape.head_width
        new = replace(new, rotary_width=max(2, 2 * round(share * new.head_width / 2)))
    faults += new.faults()
    if faults:
        raise ModelError(
            f"model `{shape.name}` cannot be built so:\n" + "\n".join(f"  {f}" for f in faults)
        )
    return new


def _with_weights(chain: Chain, *, seed: int, device: str) -> Chain:
    """The chain with real weights; tied parameters become one again."""
    layers = tuple(
        materialise(chain, index, seed=seed, device=device) for index in range(len(chain.layers))
    )
    real = replace(chain, layers=layers)
    by_name = {
        f"{name}.{path}": (layer, path)
        for name, layer in zip(chain.names, layers, strict=True)
        for path, _ in layer.named_parameters(remove_duplicate=False)
    }
    for tied, owner in chain.ties.items():
        owner_layer, owner_path = by_name[owner]
        layer, path = by_name[tied]
        put_parameter(layer, path, owner_layer.get_parameter(owner_path))
    return real
