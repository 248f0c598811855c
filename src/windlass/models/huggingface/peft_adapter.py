"""Adapters in the format of PEFT: names of tensors, and `adapter_config.json`.

Source: peft 0.18, `LoraConfig` and `get_peft_model_state_dict`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from windlass.errors import ModelError
from windlass.models.config import TransformerConfig
from windlass.models.fine_tuning.lora import LoraLinear
from windlass.models.huggingface.families import find_family
from windlass.models.huggingface.model_folder import find_model_folder, is_huggingface
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.write_config import config_content
from windlass.models.layer_stack import LayerStack
from windlass.schema import LoraRequest

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """How the adapters of a model are written for PEFT."""

    names: TensorNames
    config: dict[str, Any]
    """Content of `adapter_config.json`."""

    def tensors(self, linear: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the adapter beside one linear layer of ours.

        A layer of ours that is several of theirs gives each the same A and its own rows of B.

        Args:
            linear: full name of the layer.
            a: `[rank in]`.
            b: `[out rank]`.
        """
        for name, part in self.names.split_rows(f"{linear}.weight", b):
            module = _PREFIX + name.removesuffix(".weight")
            yield f"{module}.lora_A.weight", a
            yield f"{module}.lora_B.weight", part


def peft_adapter(config: TransformerConfig, stack: LayerStack, request: LoraRequest) -> PeftAdapter:
    """How the adapters of a model are written for PEFT.

    Args:
        config: the model's configuration.
        stack: the model, with adapters.
        request: rank and scale of the adapters.

    Raises:
        ModelError: no type of Hugging Face has this shape, or an adapter is no adapter of theirs.
    """
    if is_huggingface(config.name):
        folder = find_model_folder(config.name)
        family, base = (
            find_family(folder.read_config().get("model_type")),
            str(folder.config.parent),
        )
    else:
        (family, _), base = config_content(config), config.name
    names = TensorNames(family=family, config=config)
    adapted = list(_sources(names, linear_layers(stack, adapted=True)))
    others = list(_sources(names, linear_layers(stack, adapted=False)))
    rules = (family.rule(f"{path}.weight")[0] for path in linear_layers(stack, adapted=True))
    if shared := sorted({*_shared_sources(names, linear_layers(stack, adapted=True))}):
        raise ModelError(
            f"`{shared[0]}` of a `{family.model_type}` is two layers of ours, whose adapters are "
            "none of it; leave `gate` and `input` of the feed-forward out of "
            "`lora.targets`, or export the merged model (`--to hf:DIR`)"
        )
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if config.causal else None,
        "base_model_name_or_path": base,
        "r": request.rank,
        "lora_alpha": request.scale * request.rank,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(adapted, others),
        "bias": "none",
        "fan_in_fan_out": any(rule.layout == "transposed" for rule in rules),
        "inference_mode": True,
    }
    return PeftAdapter(names=names, config=content)


def linear_layers(stack: LayerStack, *, adapted: bool) -> list[str]:
    """Full names of the linear layers with an adapter, or of those without."""
    return [
        f"{name}.{path}" if path else name
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module, LoraLinear) == adapted
    ]


def _sources(names: TensorNames, linears: Iterable[str]) -> Iterator[str]:
    """Names of the modules of Hugging Face that linear layers of ours are made of."""
    for linear in linears:
        for source in names.sources(f"{linear}.weight"):
            yield source.removesuffix(".weight")


def _shared_sources(names: TensorNames, linears: Iterable[str]) -> Iterator[str]:
    """Names of the tensors of which linear layers of ours are a half."""
    for linear in linears:
        if names.half(f"{linear}.weight") is not None:
            yield from names.sources(f"{linear}.weight")


def _target_modules(adapted: list[str], others: list[str]) -> list[str]:
    """The last parts of the names of adapted modules; full names if others share such a part."""
    ends = {name.rpartition(".")[2] for name in adapted}
    if ends & {name.rpartition(".")[2] for name in others}:
        return sorted(adapted)
    return sorted(ends)
