"""Adapters of ours as PEFT has them: names of tensors, and `adapter_config.json`."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from windlass.errors import ModelError, shorten
from windlass.models.adapter_files.module_names import ModuleNames, adapter_base, adapter_names
from windlass.models.adapter_files.peft_model import (
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    modules_for,
    peft_config,
    read_peft,
    require_peft,
)
from windlass.models.adapter_files.peft_weights import PeftWeights, fit_adapters, module_parts
from windlass.models.config import TransformerConfig
from windlass.models.experts.mixture import Experts
from windlass.models.fine_tuning.adapter_names import is_adapter
from windlass.models.fine_tuning.lora import LINEARS, Adaptable, Adapted, is_target
from windlass.models.huggingface.families import writes_text
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.weight_files import list_file
from windlass.models.layer_stack import LayerStack
from windlass.schema import LoraRequest

ALL_LINEAR = "all-linear"
"""What PEFT calls all linear layers but the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """How the adapters of a model are written for PEFT."""

    names: TensorNames | ModuleNames
    modules: frozenset[str]
    """Every module of Hugging Face that a linear layer of ours is made of."""
    config: dict[str, Any]
    """Content of `adapter_config.json` but for the modules with an adapter and their ranks."""
    scale: float
    """What the output of each adapter is multiplied with."""
    whole: tuple[str, ...]
    """Full names of our weights that are trained whole beside the adapters."""
    tied: Mapping[str, str]
    """Full names of the weights that have the values of one that is trained whole, with its."""
    expert_rank: int
    """The largest rank of an adapter of experts, to which PEFT's other ones are filled up with
    zeros: it stacks them, and reads one rank for all. 0 if there are none."""

    def tensors(self, linear: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the adapter beside one linear layer of ours.

        A layer of ours that is several of theirs gives each the same A and its own rows of B. What
        B multiplies by zero is left out of A: so adapters that were read apart are written apart.

        Args:
            linear: full name of the layer.
            a: `[rank in]`, or `[E rank in]` of experts, each of which is a module of theirs.
            b: `[out rank]`, or `[E out rank]`.
        """
        parts = self.names.split_rows(f"{linear}.weight", b)
        for index, (name, part) in enumerate(parts):
            module = PEFT_PREFIX + self.names.module_name(name.removesuffix(".weight"))
            if a.ndim > 2:
                more = self.expert_rank - a.shape[1]
                yield f"{module}.lora_A.weight", pad(a[index], (0, 0, 0, more)).contiguous()
                yield f"{module}.lora_B.weight", pad(part, (0, more)).contiguous()
                continue
            used = part.any(dim=0)
            if len(parts) > 1 and b.any():
                if not used.any():
                    continue
                yield f"{module}.lora_A.weight", a[used]
                yield f"{module}.lora_B.weight", part[:, used].contiguous()
            else:
                yield f"{module}.lora_A.weight", a
                yield f"{module}.lora_B.weight", part

    def whole_tensors(self, weight: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one weight of ours that is trained whole, and of those tied to it.

        PEFT unties a module that it keeps whole, unless the file has all that were tied.
        """
        users = [user for user, owner in self.tied.items() if owner == weight]
        for each in (weight, *users):
            for name, part in self.names.split(each, value):
                yield PEFT_PREFIX + self.names.module_name(name), part.clone()

    def content(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The content of `adapter_config.json` for adapters of these ranks."""
        end = ".lora_A.weight"
        ranks = {
            name.removeprefix(PEFT_PREFIX).removesuffix(end): len(tensor)
            for name, tensor in tensors.items()
            if name.endswith(end)
        }
        rank = self.expert_rank or Counter(ranks.values()).most_common(1)[0][0]
        others = {name: other for name, other in _by_end(ranks).items() if other != rank}
        require_peft()
        from peft import LoraConfig

        words = self.config | {
            "r": rank,
            "lora_alpha": self.scale * rank,
            "rank_pattern": others,
            "alpha_pattern": {name: self.scale * other for name, other in others.items()},
            "target_modules": _target_modules(frozenset(ranks), self.modules - ranks.keys()),
            "modules_to_save": sorted({*_modules_of(self.names, (*self.whole, *self.tied))})
            or None,
            "ensure_weight_tying": bool(self.tied),
        }
        content = LoraConfig(**words).to_dict()
        return {k: sorted(v) if isinstance(v, set) else v for k, v in content.items()}


def peft_adapter(
    config: TransformerConfig | None, stack: LayerStack, request: LoraRequest
) -> PeftAdapter:
    """How the adapters of a model are written for PEFT.

    Args:
        config: the model's configuration; None if it runs by the code of transformers.
        stack: the model, with adapters.
        request: rank and scale of the adapters.

    Raises:
        ModelError: no type of Hugging Face has this shape, or an adapter is no adapter of theirs.
    """
    names, base = adapter_names(config, stack)
    linears = [name for name, _ in _linear_modules(stack)]
    adapted = linear_layers(stack, adapted=True)
    if shared := sorted({*_shared_sources(names, adapted)}):
        raise ModelError(
            f"`{shared[0]}` of Hugging Face is two layers of ours, whose adapters are "
            "none of it; leave `gate` and `input` of the feed-forward out of "
            "`lora.targets`, or export the merged model (`--to hf:DIR`)"
        )
    whole = _whole_weights(names, stack)
    content = {
        "peft_type": "LORA",
        "task_type": _task_type(config, stack, whole),
        "base_model_name_or_path": base,
        "lora_dropout": request.dropout,
        "bias": "none",
        "fan_in_fan_out": any(names.is_transposed(f"{path}.weight") for path in adapted),
        "inference_mode": True,
    }
    modules = frozenset(_sources(names, linears))
    return PeftAdapter(
        names=names, modules=modules, config=content, scale=request.scale, whole=whole,
        tied={user: owner for user, owner in stack.tied_weights.items() if owner in whole},
        expert_rank=_expert_rank(stack),
    )  # fmt: skip


def fitting_adapters(
    config: TransformerConfig | None, stack: LayerStack, folder: Path
) -> PeftWeights:
    """The adapters of a folder of PEFT, as those of a model's linear layers.

    Args:
        config: the model's configuration; None if it runs by the code of transformers.
        stack: the model, with adapters or without; its weights are not touched.
        folder: the folder.

    Raises:
        ModelError: it is no folder of PEFT, one of another base, or one that unties weights.
        InputErrors: everything that makes an adapter more than two factors beside a product.
    """
    linears = {name: tuple(module.weight.shape) for name, module in _linear_modules(stack)}
    weights = {
        weight: tuple(parameter.shape)
        for weight, parameter in _parameters(stack).items()
        if weight not in stack.tied_weights
    }
    names = adapter_names(config, stack)[0]
    content = read_peft(folder, adapter_base(config, stack), stack.name)
    return fit_adapters(content, names, linears, weights, stack.tied_weights, stack.name)


def own_targets(
    config: TransformerConfig | None, stack: LayerStack, targets: Sequence[str]
) -> tuple[str, ...] | None:
    """Targets of adapters in our names, of which some are as PEFT takes them.

    PEFT's are the ends of names of modules of Hugging Face (`q_proj`), `all-linear`, or regular
    expressions of whole names.

    Args:
        config: the model's configuration; None if it runs by the code of transformers.
        stack: the model, without adapters.
        targets: names of either kind.

    Returns:
        Full names of linear layers of ours in place of PEFT's; None for all of the blocks.

    Raises:
        ModelError: a name is that of a part of a layer of ours alone, or PEFT's and of no module.
    """
    if list(targets) == [ALL_LINEAR]:
        return None
    linears = {name: tuple(module.weight.shape) for name, module in _linear_modules(stack)}
    theirs = [each for each in targets if not any(is_target(name, each) for name in linears)]
    own = [each for each in targets if each not in theirs]
    if not theirs:
        return tuple(own)
    names, base = adapter_names(config, stack)[0], adapter_base(config, stack)
    modules = {
        linear: [part for part, _ in module_parts(names, linear, shape)]
        for linear, shape in linears.items()
        if names.half(f"{linear}.weight") is None
    }
    known = frozenset(part for parts in modules.values() for part in parts)
    asked: set[str] = set()
    for each in theirs:
        found = known & modules_for(base, each)
        if not found:
            ends = sorted({part.rpartition(".")[2] for part in known})
            raise ModelError(
                f"`lora.targets` has `{shorten(each)}`, and `{stack.name}` has no linear layer of "
                f"that name; PEFT knows {', '.join(ends)}, and Windlass the layers that "
                "`windlass plan` lists"
            )
        asked |= found
    for linear, parts in modules.items():
        if 0 < len(asked.intersection(parts)) < len(parts):
            raise ModelError(
                f"`lora.targets` chooses `{min(asked.intersection(parts))}` without "
                f"`{min({*parts} - asked)}`, and `{linear}` is "
                "both in one product, beside which one adapter stands; name all of its modules, or "
                "train in PEFT and read the adapter by `lora.adapter`"
            )
        own += [names.name_in_request(linear)] if asked.intersection(parts) else []
    return tuple(own)


def saved_classes(config: TransformerConfig, stack: LayerStack, folder: Path) -> int | None:
    """The classes of the head that a folder of PEFT has whole; None if it has no such head.

    Args:
        config: the configuration of the base, which may have another head.
        stack: the base.
        folder: the folder.

    Raises:
        ModelError: it is no folder of PEFT.
        InputErrors: everything that our adapters do not compute.
    """
    if config.image is None and config.block_layout != "post_norm":
        return None
    weight = "head.projection" if config.image is not None else "head.texts.classes"
    (source,) = adapter_names(config, stack)[0].sources(f"{weight}.weight")
    peft_config(folder)
    stored = list_file(folder / ADAPTER_WEIGHTS).get(f"{PEFT_PREFIX}{source}")
    return None if stored is None else stored.shape[0]


def linear_layers(stack: LayerStack, *, adapted: bool) -> list[str]:
    """Full names of the linear layers with an adapter, or of those without."""
    return [
        name for name, module in _linear_modules(stack) if isinstance(module, Adapted) == adapted
    ]


def _parameters(stack: LayerStack) -> dict[str, nn.Parameter]:
    """Every parameter by its full name, adapters left out."""
    return {
        f"{name}.{path}": parameter
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, parameter in layer.named_parameters(remove_duplicate=False)
        if not is_adapter(path)
    }


def _whole_weights(names: TensorNames | ModuleNames, stack: LayerStack) -> tuple[str, ...]:
    """Full names of the weights that are trained whole.

    Raises:
        ModelError: another weight of the same module of theirs is frozen.
    """
    weights = {n: p for n, p in _parameters(stack).items() if n not in stack.tied_weights}
    whole = tuple(name for name, parameter in weights.items() if parameter.requires_grad)
    modules = {*_modules_of(names, whole)}
    for name, parameter in weights.items():
        if not parameter.requires_grad and modules & {*_modules_of(names, (name,))}:
            raise ModelError(
                f"`{name}` is frozen, and PEFT keeps each module whole of which a weight is "
                "trained; add it to `lora.trained`, or export the merged model (`--to hf:DIR`)"
            )
    return whole


def _modules_of(names: TensorNames | ModuleNames, weights: Iterable[str]) -> Iterator[str]:
    """Names of the modules of Hugging Face that have the tensors of weights of ours."""
    for weight in weights:
        for source in names.sources(weight):
            yield names.module_name(source).rpartition(".")[0]


def _task_type(
    config: TransformerConfig | None, stack: LayerStack, whole: Iterable[str]
) -> str | None:
    """What PEFT calls the task. It looks for a trained head beside adapters of classes of texts."""
    if writes_text(stack.name) if config is None else config.causal:
        return "CAUSAL_LM"
    if config is None:
        return None
    trains_head = any(weight.startswith("head.texts.classes.") for weight in whole)
    return "SEQ_CLS" if trains_head else None


def _linear_modules(stack: LayerStack) -> Iterator[tuple[str, nn.Linear | Adaptable]]:
    """Every linear layer with its full name."""
    for name, layer in zip(stack.names, stack.layers, strict=True):
        for path, module in layer.named_modules():
            if isinstance(module, LINEARS):
                yield f"{name}.{path}" if path else name, module


def _expert_rank(stack: LayerStack) -> int:
    """The largest rank of an adapter of experts; 0 if there is none.

    Raises:
        ModelError: adapters stand beside some linear layers of experts that PEFT does not read so.
    """
    ranks = [0]
    for name, layer in zip(stack.names, stack.layers, strict=True):
        for path, experts in layer.named_modules():
            if not isinstance(experts, Experts):
                continue
            linears = dict(experts.named_children())
            adapted = {key: each for key, each in linears.items() if isinstance(each, Adapted)}
            if adapted.keys() not in ({}.keys(), {"down"}, linears.keys()):
                raise ModelError(
                    f"the experts of `{name}.{path}` have adapters beside "
                    f"{' and '.join(f'`{key}`' for key in adapted)}, and PEFT reads those of all "
                    "linear layers of experts together, or those of `down` alone; name these in "
                    "`lora.targets`, or export the merged model (`--to hf:DIR`)"
                )
            ranks += [each.rank for each in adapted.values()]
    return max(ranks)


def _sources(names: TensorNames | ModuleNames, linears: Iterable[str]) -> Iterator[str]:
    """Names of the modules of Hugging Face that linear layers of ours are made of."""
    for linear in linears:
        for source in names.sources(f"{linear}.weight"):
            yield names.module_name(source).removesuffix(".weight")


def _shared_sources(names: TensorNames | ModuleNames, linears: Iterable[str]) -> Iterator[str]:
    """Names of the tensors of which linear layers of ours are a half."""
    for linear in linears:
        if names.half(f"{linear}.weight") is not None:
            yield from names.sources(f"{linear}.weight")


def _by_end(ranks: Mapping[str, int]) -> dict[str, int]:
    """Ranks by the last parts of the names of modules, or by full names where these differ."""
    ends: dict[str, set[int]] = defaultdict(set)
    for name, rank in ranks.items():
        ends[name.rpartition(".")[2]].add(rank)
    return {
        end if len(ends[end]) == 1 else name: rank
        for name, rank in ranks.items()
        for end in (name.rpartition(".")[2],)
    }


def _target_modules(adapted: frozenset[str], others: frozenset[str]) -> list[str]:
    """The last parts of the names of adapted modules; full names if others share such a part."""
    ends = {name.rpartition(".")[2] for name in adapted}
    if ends & {name.rpartition(".")[2] for name in others}:
        return sorted(adapted)
    return sorted(ends)
