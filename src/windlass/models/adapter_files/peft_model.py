"""Adapters as PEFT itself reads them: beside its base, a model of transformers without memory."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from re import error as PatternError  # noqa: N812  it is a class
from typing import Any

import torch
from torch import Tensor, nn

from windlass.document import read_json_object
from windlass.errors import InputErrors, ModelError, shorten
from windlass.models.huggingface.model_folder import ADAPTER_CONFIG, is_peft_folder

PEFT_PREFIX = "base_model.model."
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_SAVED = ".modules_to_save.default"
"""Part of the names of weights that are trained whole."""
_READ = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
})  # fmt: skip
"""Keys that PEFT follows for two factors, or that change nothing of a trained adapter."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to draw an adapter that leave the weights of the base as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftFactors:
    """An adapter of two factors beside one module of transformers."""

    a: Tensor
    """`[rank in]`, or `[E rank in]` of experts."""
    b: Tensor
    """`[out rank]`, or `[E out rank]` of experts."""
    scale: float

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.b.shape[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftContent:
    """What a folder holds for a base."""

    path: Path
    config: Any
    """A `LoraConfig` of PEFT, which has no types of its own."""
    adapters: Mapping[str, PeftFactors]
    """By name of the module; of experts by that of their parameter."""
    whole: Mapping[str, Tensor]
    """Weights of the base that were trained whole, by their names there."""
    copies: Mapping[str, Tensor]
    """Weights of the base that the folder has too, as PEFT saves embeddings beside adapters."""


def peft_config(folder: Path) -> Any:  # noqa: ANN401  of PEFT
    """The `LoraConfig` of a folder.

    Raises:
        ModelError: it is no folder of PEFT, or PEFT is not installed.
        InputErrors: everything that makes an adapter more than two factors beside a product.
    """
    if not is_peft_folder(folder):
        raise ModelError(
            f"`{shorten(str(folder))}` has no `{ADAPTER_CONFIG}`, which every adapter of PEFT has"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"`{folder}` has no `{ADAPTER_WEIGHTS}`; adapters are read from safetensors alone, so "
            "save them again by `model.save_pretrained(NEW)`"
        )
    require_peft()
    from peft import LoraConfig

    file = folder / ADAPTER_CONFIG
    content = read_json_object(file, ModelError)
    kind = str(content.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise InputErrors([f"`{file}` has `peft_type` = {shorten(kind)}; only LORA is read"])
    # Every way to be more than a pair of factors has a key that is empty without it.
    if others := [key for key, value in content.items() if key not in _READ and value]:
        what = "with which an adapter may be no pair of factors alone"
        raise InputErrors([f"`{file}` has `{key}`, {what}" for key in others])
    try:
        known = {key: content[key] for key in LoraConfig().to_dict().keys() & content.keys()}
        config = LoraConfig(**known | {"peft_type": "LORA"})
    except Exception as error:
        raise ModelError(f"{file}: PEFT cannot read it: {_said(error)}") from error
    if wrong := [f"`{file}` has {each}" for each in _misfits(config)]:
        raise InputErrors(wrong)
    return config


def _misfits(config: Any) -> Iterator[str]:  # noqa: ANN401  of PEFT
    """What a configuration asks for that two factors beside a product do not compute."""
    if config.bias != "none":
        yield f"`bias` = {shorten(str(config.bias))}; biases are not trained beside adapters"
    if config.init_lora_weights not in _PLAIN_STARTS:
        yield (
            f"`init_lora_weights` = {shorten(str(config.init_lora_weights))}, which changes the "
            "weights of the base; convert it to a plain adapter with PEFT"
        )
    if not isinstance(config.lora_alpha, int | float) or not config.lora_alpha > 0:
        yield f"`lora_alpha` = {config.lora_alpha!r}, which is no number above 0"
    dropout = config.lora_dropout
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        yield f"`lora_dropout` = {dropout!r}, which is no number from 0 to 1"


def read_peft(folder: Path, base: Any, model: str) -> PeftContent:  # noqa: ANN401
    """What a folder holds for a base, by PEFT.

    Args:
        folder: the folder.
        base: a model of transformers on the meta device, which is changed.
        model: its name in messages.

    Raises:
        ModelError: it is no folder of PEFT, or one of another base.
        InputErrors: everything that makes an adapter more than two factors beside a product.
    """
    config = peft_config(folder)
    from peft import get_peft_model, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    name = config.base_model_name_or_path
    beside = f" trained beside `{shorten(str(name))}`" if name else ""
    unfit = f"the adapters of `{folder}`{beside} do not fit `{model}`"
    try:
        stored = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"`{folder / ADAPTER_WEIGHTS}` is damaged: {_said(error)}") from error
    _require_shapes(stored, base, unfit)
    types = [torch.float32, *(tensor.dtype for tensor in stored.values())]
    _without_memory(base, reduce(torch.promote_types, types))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = get_peft_model(
                base, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True
            )
            result = set_peft_model_state_dict(loaded, stored, low_cpu_mem_usage=True)
        except Exception as error:
            raise ModelError(
                f"{unfit}, as PEFT finds ({_said(error)}); name the model that they were trained "
                "beside"
            ) from error
    adapters, wrong = _adapters(loaded), [f"`{key}`, no such layer" for key in result[1]]
    wrong += [f"`{name}` has one factor of two" for name, each in adapters.items() if each is None]
    if wrong or not adapters:
        raise ModelError(
            f"{unfit}: {len(wrong)} of its {len(stored)} tensors have no place there "
            f"({'; '.join(wrong[:3]) or 'no adapter'}); name the model that they were trained "
            "beside"
        )
    factors = {name: each for name, each in adapters.items() if each is not None}
    whole, copies = (dict(_weights(loaded, trained=trained)) for trained in (True, False))
    return PeftContent(path=folder, config=config, adapters=factors, whole=whole, copies=copies)


def modules_for(base: nn.Module, target: str) -> frozenset[str]:
    """The modules of a base that PEFT adapts for one target: the end of a name, or a pattern."""
    require_peft()
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    names = [name for name, _ in base.named_modules() if name]
    for words in ([target], target):
        config = LoraConfig(target_modules=words)
        try:
            found = frozenset(name for name in names if check_target_module_exists(config, name))
        except PatternError:
            continue
        if found:
            return found
    return frozenset()


def require_peft() -> None:
    """Refuses to go on without PEFT.

    Raises:
        ModelError: it is not installed.
    """
    if find_spec("peft") is None:
        raise ModelError("adapters are read and written by PEFT; `pip install 'windlass[hf]'`")


def _require_shapes(stored: Mapping[str, Tensor], base: Any, unfit: str) -> None:  # noqa: ANN401
    """Refuses weights of the base in other shapes, such as embeddings of a base that was resized.

    Raises:
        ModelError: there is one.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in base.named_parameters()}
    for key, tensor in stored.items():
        shape = shapes.get(key.removeprefix(PEFT_PREFIX).replace(".base_layer", ""))
        if shape is None or shape == tuple(tensor.shape):
            continue
        way_out = "name the model that they were trained beside"
        if shape == tuple(base.get_input_embeddings().weight.shape):
            way_out = (
                "save the base as it was resized for them "
                f"(`model.resize_token_embeddings({len(tensor)})`), and name that folder"
            )
        raise ModelError(
            f"{unfit}: `{key.removeprefix(PEFT_PREFIX)}` {list(tensor.shape)} where "
            f"{list(shape)} fits; {way_out}"
        )


def _without_memory(base: Any, dtype: torch.dtype) -> None:  # noqa: ANN401  of transformers
    """Gives parameters on the meta device one number each, as PEFT moves adapters to a device."""
    for module in base.modules():
        for name, parameter in module.named_parameters(recurse=False):
            number = torch.zeros((), dtype=dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(number, requires_grad=False))
    base.tie_weights()


def _adapters(loaded: nn.Module) -> dict[str, PeftFactors | None]:
    """The adapters that have values, by module; None for one that lacks a factor."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    adapters: dict[str, PeftFactors | None] = {}
    for path, layer in loaded.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if not layer.lora_A:
            raise ModelError(
                f"`{path.removeprefix(PEFT_PREFIX)}` has an adapter of PEFT's kind "
                f"`{type(layer).__name__}`, and only those beside linear layers are read; train "
                "the adapter in PEFT, and import the merged model"
            )
        (a,), (b,) = (
            [each.weight.detach() for each in table.values()]
            for table in (layer.lora_A, layer.lora_B)
        )
        name = path.removeprefix(PEFT_PREFIX)
        if isinstance(layer, ParamWrapper):
            name = name.replace(".base_layer", "").removesuffix(".base_layer")
            name += f".{layer.parameter_name}" if layer.parameter_name != "weight" else ""
            if layer.num_experts > 1:
                a = a.view(layer.num_experts, -1, a.shape[-1])
                b = b.view(len(b), -1, layer.num_experts).permute(2, 0, 1)
        if a.is_meta and b.is_meta:
            continue
        (scale,) = layer.scaling.values()
        lacks = a.is_meta or b.is_meta
        adapters[name] = None if lacks else PeftFactors(a=a, b=b, scale=float(scale))
    return adapters


def _weights(loaded: nn.Module, *, trained: bool) -> Iterator[tuple[str, Tensor]]:
    """The weights of the base with values from the folder, by their names in the base."""
    for path, parameter in loaded.named_parameters():
        is_number = parameter.ndim and not any(parameter.stride())
        if is_number or ".lora_" in path or ".original_module." in path:
            continue
        name = path.removeprefix(PEFT_PREFIX).replace(".base_layer", "")
        if (_SAVED in name) == trained:
            yield name.replace(_SAVED, ""), parameter.detach()


def _said(error: Exception) -> str:
    """The first thing that an error of a library names, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch has a line for each weight below a heading.
    first = lines[1] if len(lines) > 1 and lines[0].startswith("Error(s)") else " ".join(lines)
    return first[:300] or type(error).__name__
