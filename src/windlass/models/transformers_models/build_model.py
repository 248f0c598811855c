"""A folder of Hugging Face as a model of transformers, without memory for its weights.

The library's own grouped products have no fake tensors in float32 and are not compiled there. This
is its `grouped_mm` path, with our operator for the products.
"""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import ModelError, shorten
from windlass.models.experts.grouped_products import grouped_linear
from windlass.models.huggingface.model_folder import find_model_folder
from windlass.models.tracing.block_list import find_blocks
from windlass.models.tracing.model_call import ModelCall

_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)
"""Tables of transformers that name the classes which can be trained here."""
_IMAGES = "pixel_values"


def build_pretrained(name: str) -> Any:  # noqa: ANN401  a model of transformers
    """The model of a folder on the meta device, in float32; buffers outside of weights are real.

    No code of the folder runs, and no weight is read. Dropout is zero, as it is a setting of
    training.

    Raises:
        ModelError: transformers is not installed, does not know the model, or cannot build it.
    """
    folder = find_model_folder(name)
    return model_of_content(folder.read_config(), str(folder.config))


def model_of_content(content: Mapping[str, Any], place: str) -> Any:  # noqa: ANN401
    """The model of the content of a `config.json`, as `build_pretrained` gives it.

    Args:
        content: the content.
        place: its file in messages.

    Raises:
        ModelError: as `build_pretrained`.
    """
    require_transformers(f"`{place}` is a `{shorten(str(content.get('model_type')))}`, which")
    with _quiet():
        config = _configuration(place, content)
        model_class = _model_class(place, content)
        try:
            with torch.device("meta"):
                model = model_class(config)
        except Exception as error:
            raise ModelError(
                f"{place}: transformers cannot build this `{content['model_type']}`: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
        prepare(model)
    model.tie_weights()
    return model.train()


def prepare(model: Any) -> None:  # noqa: ANN401
    """Lets a model of transformers run without a cache, and without sizes that depend on data."""
    model.config.use_cache = False
    register_experts()
    if any(hasattr(module, "has_gate") for module in model.modules()):
        model.set_experts_implementation(EXPERTS)
    fill_buffers(model)


def require_transformers(what: str) -> None:
    """Refuses to go on without transformers.

    Raises:
        ModelError: it is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{what} runs by the code of transformers, which is not installed; "
            "`pip install 'windlass[hf]'`"
        )


def call_of_module(module: nn.Module, name: str) -> ModelCall | None:
    """How a user's module is called, if it is one of transformers; it is prepared for that.

    Raises:
        ModelError: it has no list of blocks.
    """
    # A module of transformers cannot exist where that is not loaded.
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    prepare(module)
    return model_call(module, len(find_blocks(module, name)))


def model_call(model: Any, blocks: int) -> ModelCall:  # noqa: ANN401
    """How a model of transformers is called."""
    config = model.config
    examples = None
    if model.main_input_name == _IMAGES:
        size = config.image_size
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        examples = (config.num_channels, *sides)
    per_layer = {
        key: tuple(value)
        for key, value in vars(config).items()
        if (isinstance(value, list | tuple) or ("pattern" in key and isinstance(value, str)))
        and len(value) == blocks
    }
    return ModelCall(input_name=model.main_input_name, examples=examples, per_layer=per_layer)


def max_sequence(model: Any) -> int | None:  # noqa: ANN401
    """The longest sequence that a model's configuration names; None if it names none."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest <= 0:
        return None
    for path, module in model.named_modules():
        # Positions of RoBERTa and its kin are counted from the row after that of padding.
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return longest - (0 if module.padding_idx is None else module.padding_idx + 1)
    return longest


def draw_weights(model: Any, module: nn.Module) -> None:  # noqa: ANN401
    """Draws the weights of one module, and computes its buffers, as its model does."""
    with torch.no_grad():
        model._init_weights(module)  # noqa: SLF001  what models of transformers define for it
        adapter = getattr(module, "reset_adapter", None)
        if adapter is not None:
            adapter()


def fill_buffers(model: Any) -> None:  # noqa: ANN401
    """Gives buffers that no file has their numbers, if they have none yet.

    Raises:
        ModelError: the model computes one in no place that it has for that.
    """
    made: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and name in module._non_persistent_buffers_set:  # noqa: SLF001
                new = torch.full_like(buffer, _unset(buffer), device="cpu")
                made[f"{path}.{name}" if path else name] = new
                setattr(module, name, new)
    if not made:
        return
    # A module may compute buffers of those inside of it; weights on the meta device cost nothing.
    for module in model.modules():
        draw_weights(model, module)
    for name, buffer in made.items():
        is_set = ~buffer.isnan() if buffer.is_floating_point() else buffer != _unset(buffer)
        if buffer.dtype != torch.bool and not is_set.all():
            raise ModelError(
                f"buffer `{name}` of `{type(model).__name__}` is in no file, and its "
                "`_init_weights` does not compute it"
            )


def _unset(buffer: Tensor) -> float | int | bool:
    """A number that no buffer has."""
    if buffer.is_floating_point():
        return float("nan")
    return False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min


def _configuration(place: str, content: Mapping[str, Any]) -> Any:  # noqa: ANN401
    from transformers import CONFIG_MAPPING

    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{place}: `model_type` = {shorten(str(model_type))!r} is none that the "
            "installed transformers knows, and code in a folder is never run; a module of your "
            "own is named `file.py:function`"
        )
    config_class = CONFIG_MAPPING[model_type]
    try:
        config = config_class(**config_class._decode_special_floats(dict(content)))  # noqa: SLF001
    except Exception as error:
        raise ModelError(
            f"{place}: transformers cannot read it: {' '.join(str(error).split())[:300]}"
        ) from error
    _refuse(place, config)
    for key, value in vars(config).items():
        if ("dropout" in key or key.endswith(("pdrop", "drop_path_rate", "layerdrop"))) and value:
            setattr(config, key, type(value)(0))
    config.dtype = torch.float32
    return config


def _refuse(place: str, config: Any) -> None:  # noqa: ANN401
    """Refuses settings by which a model is trained otherwise than by its layers alone."""
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"{place}: `output_router_logits` adds a loss made of all blocks' routers, "
            "which layers after each other do not pass on; set it to false in a copy of the file"
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{place}: `quantization_config` says that its weights are quantized, and "
            "they are trained in floating point; save a dequantized copy of the folder"
        )


def _model_class(place: str, content: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The class that `architectures` names, or the first of those for the model's type."""
    import transformers
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, table) for table in _HEADS]
    model_type = content["model_type"]
    known = [
        each
        for table in tables
        for entry in [table.get(model_type, ())]
        for each in ([entry] if isinstance(entry, str) else entry)
    ]
    named = [each for each in content.get("architectures") or () if isinstance(each, str)]
    chosen = next((each for each in named if each in known), None)
    if (named and chosen is None) or not known:
        heads = ", ".join(f"`{each}`" for each in known) or "none"
        raise ModelError(
            f"{place}: a `{named[0] if named else model_type}` is none of the models of "
            f"text or images that can be trained (of this `model_type`: {heads})"
        )
    return getattr(transformers, chosen or known[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps warnings of transformers, which are of its own use, from the output.

    So are those of torchao, which it imports: of kernels for GPUs that are not here.
    """
    names = ("transformers", "torchao", "torch.utils._pytree")
    levels = {log: log.level for log in map(logging.getLogger, names)}
    try:
        for log in levels:
            log.setLevel(logging.ERROR)
        yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)


EXPERTS = "windlass"
"""Under which transformers knows it."""


def register_experts() -> None:
    """Tells transformers of this way to compute experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


def experts_forward(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # noqa: ANN401
    """The sum of the chosen experts' outputs, `[t d]`.

    Args:
        module: experts of transformers, whose attributes say how its weights lie.
        x: `Float[t d]`.
        index: the experts of each token, `Int[t k]`.
        weights: their factors, `Float[t k]`.
    """
    chosen = index.shape[-1]
    experts, order = torch.sort(index.reshape(-1), stable=True)
    counts = torch.zeros(module.num_experts, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, experts, torch.ones_like(experts))
    rows = x[order // chosen]
    first = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = _product(module, first, rows, experts, counts)
    activate = module._apply_gate if module.has_gate else module.act_fn  # noqa: SLF001  its hook
    hidden = activate(hidden)
    y = _product(module, "down_proj", hidden, experts, counts)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    y = y * weights.reshape(-1)[order].unsqueeze(-1)
    restored = torch.zeros_like(y).index_copy(0, order, y)
    return restored.view(len(x), chosen, -1).sum(1).to(x.dtype)


def _product(module: Any, name: str, x: Tensor, experts: Tensor, counts: Tensor) -> Tensor:  # noqa: ANN401
    weight = getattr(module, name)
    weight = weight.transpose(1, 2) if module.is_transposed else weight
    y = grouped_linear(x.to(weight.dtype), weight, counts)
    return y + getattr(module, f"{name}_bias")[experts] if module.has_bias else y
