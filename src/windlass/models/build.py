"""Builds a layer stack by name: a model of the catalog, or a function in a user's file."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from windlass.errors import ModelError
from windlass.models.adapter_files.base_weights import with_files
from windlass.models.adapter_files.peft_adapter import fitting_adapters
from windlass.models.catalog import (
    ModelArgument,
    apply_model_arguments,
    apply_resnet_arguments,
    is_residual,
    model_config,
    resnet_config,
    runs_by_transformers,
)
from windlass.models.config import TransformerConfig
from windlass.models.experts.arguments import refuse_sparse_experts
from windlass.models.fine_tuning.adapter_names import is_adapter
from windlass.models.fine_tuning.frozen import freeze_weights
from windlass.models.fine_tuning.lora import add_adapters
from windlass.models.huggingface.model_folder import find_model_folder, is_huggingface
from windlass.models.huggingface.new_head import classes_of
from windlass.models.huggingface.pretrained_weights import open_pretrained
from windlass.models.images.image_config import ResNetConfig
from windlass.models.images.resnet import build_resnet
from windlass.models.init_weights import set_parameter
from windlass.models.layer_stack import (
    LayerStack,
    layer_stack_from_module,
    materialize_layer,
    named_layers,
)
from windlass.models.sparsity.sparse_layers import make_sparse
from windlass.models.tracing.block_list import find_blocks
from windlass.models.tracing.user_model import build_user_model, call_model_function
from windlass.models.transformer import build_transformer
from windlass.models.transformers_models.build_model import (
    build_pretrained,
    call_of_module,
    draw_weights,
    max_sequence,
    model_call,
)
from windlass.models.transformers_models.stored_weights import names_in_model, open_stored
from windlass.models.transformers_models.tp_rules import with_model_rules
from windlass.schema import LoraRequest, SparsityRequest, is_users_own

_FREE_ARGUMENTS = ("dropout", "split_blocks", "balance_loss", "sentence_head")
"""Arguments that leave the shape of every weight as it is."""
_SIZE, _CLASSES = "input_shape", "classes"


def build_layer_stack(
    name: str,
    arguments: Mapping[str, ModelArgument],
    *,
    device: str,
    seed: int = 0,
    sharding_rules: Mapping[str, str] | None = None,
    sparsity: SparsityRequest | None = None,
    lora: LoraRequest | None = None,
    frozen: tuple[str, ...] | None = None,
    weightless: bool = False,
) -> LayerStack:
    """Builds the layer stack of a model.

    Args:
        name: a name of the catalog, `hf:DIR` for a Hugging Face folder, whose weights are read
            when a layer is made, or `file.py:function` for a function that returns an
            `nn.Module`.
        arguments: changes to the catalog model's configuration; for a file, keyword arguments of
            the function.
        device: `meta` allocates no weights. On any other device weights are drawn from the seed,
            for catalog models each parameter from (seed, its name) alone.
        sharding_rules: tensor-parallel rules by pattern of module names, in the syntax of
            `parse_sharding_rule`, in addition to those that catalog models define themselves.
        sparsity: which weights are absent; None keeps all.
        lora: adapters beside linear layers; None adds none.
        frozen: patterns of the names of frozen weights; None freezes none.
        weightless: whether the files with a Hugging Face model's weights are left alone, because
            a checkpoint has newer ones or none are needed.

    Raises:
        ModelError: the model is unknown, arguments, rules or patterns do not fit it, it is not a
            sequence of layers, or all of its weights are frozen.
        InputErrors: every tensor of a Hugging Face folder that does not fit its `config.json`.
    """
    if is_users_own(name):
        shape, predicts, dials = _split_examples(arguments)
        user_module = build_user_model(name, dials, device=device, seed=seed)
        _make_trainable(user_module, name, sparsity, lora, frozen, seed=seed)
        stack = _stack_of_module(user_module, name, shape, predicts, sharding_rules)
        return _with_base(_with_mask_file(stack, sparsity), lora, device=device)
    if is_residual(name):
        others = (lora, sparsity, sharding_rules)
        return _residual_stack(
            name,
            arguments,
            device=device,
            seed=seed,
            frozen=frozen,
            others=others,
            weightless=weightless,
        )
    if runs_by_transformers(name):
        stack = _transformers_stack(
            name, arguments, seed=seed, sharding_rules=sharding_rules,
            others=(sparsity, lora, frozen), weightless=weightless,
        )  # fmt: skip
        return stack if device == "meta" else _with_weights(stack, seed=seed, device=device)
    config = apply_model_arguments(model_config(name), arguments)
    refuse_sparse_experts(config, sparse=sparsity is not None)
    is_pretrained = is_huggingface(name) and find_model_folder(name).weights is not None
    if is_pretrained:
        own = {key: arguments[key] for key in arguments if key != _CLASSES}
        _require_own_shape(name, own, sparsity)
    with torch.device("meta"):
        module = build_transformer(config)
    _make_trainable(module, name, sparsity, lora, frozen, seed=seed)
    stack = layer_stack_from_module(
        module,
        name,
        vocabulary=config.vocabulary,
        max_sequence=None if config.image else config.sequence,
        input_shape=config.image,
        sharding_rules=sharding_rules,
    )
    stack = _with_mask_file(stack, sparsity)
    if is_pretrained and not weightless:
        stack = _with_pretrained_weights(stack, config)
    if not weightless:
        stack = _with_adapters(stack, config, lora)
    return stack if device == "meta" else _with_weights(stack, seed=seed, device=device)


def layer_stack_of(
    model: nn.Module | Callable[..., object],
    name: str,
    arguments: Mapping[str, ModelArgument],
    *,
    device: str,
    seed: int,
    sharding_rules: Mapping[str, str] | None = None,
    sparsity: SparsityRequest | None = None,
    lora: LoraRequest | None = None,
    frozen: tuple[str, ...] | None = None,
) -> LayerStack:
    """The layer stack of a module, or of what a function builds.

    Args:
        model: a module, whose weights the stack takes over, or a function that returns one.
        arguments: keyword arguments of the function; a module takes none.
        seed: seed of torch's generator while a function runs.
        sparsity: which weights are absent; a module loses them. None keeps all.
        lora: adapters beside linear layers; None adds none.
        frozen: patterns of the names of frozen weights; None freezes none.

    Raises:
        ModelError: the function fails, the module is not a sequence of layers, a pattern does not
            fit it, or all of its weights are frozen.
    """
    shape, predicts, arguments = _split_examples(arguments)
    if not isinstance(model, nn.Module):
        file = getattr(getattr(model, "__code__", None), "co_filename", name)
        model = call_model_function(name, model, arguments, Path(file), device=device, seed=seed)
    elif arguments:
        keys = ", ".join(f"`model.{key}`" for key in arguments)
        raise ModelError(f"`{name}` is a module that is built already, which takes no {keys}")
    _make_trainable(model, name, sparsity, lora, frozen, seed=seed)
    stack = _stack_of_module(model, name, shape, predicts, sharding_rules)
    return _with_base(_with_mask_file(stack, sparsity), lora, device=device)


def _stack_of_module(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...] | None,
    predicts: str | None,
    sharding_rules: Mapping[str, str] | None,
) -> LayerStack:
    """The layer stack of a user's module; one of transformers says how it is called."""
    call = call_of_module(module, name)
    stack = layer_stack_from_module(
        module,
        name,
        max_sequence=None if call is None else max_sequence(module),
        input_shape=shape if call is None else call.examples,
        predicts=predicts,
        sharding_rules=sharding_rules,
        call=call,
    )
    return stack if call is None else with_model_rules(stack, module)


def _transformers_stack(
    name: str,
    arguments: Mapping[str, ModelArgument],
    *,
    seed: int,
    sharding_rules: Mapping[str, str] | None,
    others: tuple[SparsityRequest | None, LoraRequest | None, tuple[str, ...] | None],
    weightless: bool,
) -> LayerStack:
    """The layer stack of a Hugging Face model that runs by the code of transformers.

    Args:
        arguments: changes to its configuration, of which it takes none.
        others: sparsity, adapters, and patterns of the names of frozen weights.
        weightless: whether the files with its weights are left alone.
    """
    model = build_pretrained(name)
    _make_trainable(model, name, *others, seed=seed)
    call = model_call(model, len(find_blocks(model, name)))
    if other := [key for key in arguments if (key, arguments[key]) != (_SIZE, call.examples)]:
        keys = " and ".join(f"`model.{key}`" for key in other)
        raise ModelError(
            f"`{name}` runs by the code of transformers, in the shape of its `config.json`, which "
            f"{keys} would change; change a copy of that file"
        )
    stack = layer_stack_from_module(
        model, name, max_sequence=max_sequence(model), input_shape=call.examples,
        sharding_rules=sharding_rules, call=call,
    )  # fmt: skip
    stack = with_model_rules(_with_mask_file(stack, others[0]), model)
    stack = replace(stack, draw=partial(draw_weights, model))
    folder = find_model_folder(name).weights
    if folder is not None and not weightless:
        weights = open_stored(model, folder, names_in_model(stack), stack.tied_weights)
        stack = replace(stack, weights=weights)
    return stack if weightless else _with_adapters(stack, None, others[1])


def _residual_stack(
    name: str,
    arguments: Mapping[str, ModelArgument],
    *,
    device: str,
    seed: int,
    frozen: tuple[str, ...] | None,
    others: tuple[object, ...],
    weightless: bool,
) -> LayerStack:
    """The layer stack of a residual network.

    Args:
        device: `meta`, or where weights are drawn.
        others: what only transformers take, None each.
        weightless: whether the files with a Hugging Face model's weights are left alone.
    """
    config = resnet_config(name)
    if config is None or any(other is not None for other in others):
        raise ModelError(
            f"`{name}` is a residual network, whose convolutions take no adapter, no sparsity and "
            "no `model.sharding_rules`; leave them out"
        )
    is_pretrained = is_huggingface(name) and find_model_folder(name).weights is not None
    if is_pretrained:
        # Its convolutions take images of any size.
        own = {key: arguments[key] for key in arguments if key not in (_SIZE, _CLASSES)}
        _require_own_shape(name, own, None)
    config = apply_resnet_arguments(config, arguments)
    with torch.device("meta"):
        module = build_resnet(config)
    freeze_weights(module, name, frozen or ())
    stack = layer_stack_from_module(module, name, input_shape=config.image)
    if is_pretrained and not weightless:
        stack = _with_pretrained_weights(stack, config)
    return stack if device == "meta" else _with_weights(stack, seed=seed, device=device)


def _split_examples(
    arguments: Mapping[str, ModelArgument],
) -> tuple[tuple[int, ...] | None, str | None, dict[str, ModelArgument]]:
    """Shape of one input, what is predicted of it, and the arguments of a user's function."""
    dials = dict(arguments)
    shape, predicts = dials.pop("input_shape", None), dials.pop("predicts", None)
    if predicts is not None and shape is None:
        raise ModelError(
            f"`model.predicts` = {predicts} without `model.input_shape`, so that the model takes "
            "tokens; set `model.input_shape`, such as [3, 32, 32]"
        )
    return (
        shape if isinstance(shape, tuple) else None,
        predicts if isinstance(predicts, str) else None,
        dials,
    )


def _require_own_shape(
    name: str, arguments: Mapping[str, ModelArgument], sparsity: SparsityRequest | None
) -> None:
    """Refuses to build trained weights in another shape than theirs."""
    wrong = [f"`model.{key}`" for key in arguments if key not in _FREE_ARGUMENTS]
    if sparsity is not None:
        wrong.append("`sparsity`")
    if wrong:
        raise ModelError(
            f"`{name}` has weights of its own shape, which {' and '.join(wrong)} would change; "
            f"leave that out, or name `{name.rstrip('/')}/config.json`, whose weights are drawn"
        )


def pretrained_classes(name: str) -> int | None:
    """The classes that the head of a Hugging Face folder with weights tells apart.

    Returns:
        0 if its head says no class; None for any other model.

    Raises:
        ModelError: there is no such folder.
    """
    if not is_huggingface(name) or find_model_folder(name).weights is None:
        return None
    if runs_by_transformers(name):
        return None
    config = resnet_config(name) or model_config(name)
    of_texts = config.text_classes if isinstance(config, TransformerConfig) else None
    return of_texts or classes_of(config) or 0


def _with_pretrained_weights(
    stack: LayerStack, config: TransformerConfig | ResNetConfig
) -> LayerStack:
    """The stack, which reads its weights from the folder that its configuration is from.

    The running statistics of a residual network are in its folder, too.
    """
    tensors: dict[str, Tensor] = {
        f"{name}.{path}": parameter
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, parameter in layer.named_parameters(remove_duplicate=False)
        if not is_adapter(path)
    }
    if isinstance(config, ResNetConfig):
        tensors |= {
            f"{name}.{path}": buffer
            for name, layer in zip(stack.names, stack.layers, strict=True)
            for path, buffer in layer.named_buffers()
        }
    return replace(stack, weights=open_pretrained(config, tensors, stack.tied_weights))


def _make_trainable(
    model: nn.Module,
    name: str,
    sparsity: SparsityRequest | None,
    lora: LoraRequest | None,
    frozen: tuple[str, ...] | None,
    *,
    seed: int,
) -> None:
    """Makes linear layers sparse, gives them adapters, and freezes weights, in place."""
    if lora is not None and lora.adapter is not None and is_users_own(name):
        raise ModelError(
            f"`lora.adapter` names adapters of PEFT, which know no model of your own (`{name}`); "
            "leave it out"
        )
    if sparsity is not None:
        make_sparse(model, name, sparsity, seed=seed)
    if lora is not None:
        is_chain = isinstance(model, (nn.Sequential, nn.ModuleList))
        layers = [layer for layer, _ in named_layers(model)]
        # The ends of any other module have no name before it is taken apart.
        layers = layers if is_chain else ["", *find_blocks(model, name), ""]
        add_adapters(model, name, layers, lora, seed=seed)
    freeze_weights(model, name, frozen or ())


def _with_mask_file(stack: LayerStack, sparsity: SparsityRequest | None) -> LayerStack:
    """The stack, which knows where the masks of its layers come from."""
    if sparsity is None or sparsity.mask is None:
        return stack
    return replace(stack, mask_file=Path(sparsity.mask))


def _with_base(stack: LayerStack, lora: LoraRequest | None, *, device: str) -> LayerStack:
    """A stack of a user's own model with the weights of `lora.base`, where it needs any."""
    if lora is None or lora.base is None or device == "meta":
        return stack
    return with_files(stack, Path(lora.base), None)


def _with_adapters(
    stack: LayerStack, config: TransformerConfig | None, lora: LoraRequest | None
) -> LayerStack:
    """A stack of Hugging Face or the catalog with what `lora.base` and `lora.adapter` hold.

    Args:
        config: its configuration; None if it runs by the code of transformers.
    """
    if lora is None:
        return stack
    base, folder = (None if each is None else Path(each) for each in (lora.base, lora.adapter))
    adapters = None if folder is None else fitting_adapters(config, stack, folder)
    return with_files(stack, base, adapters)


def _with_weights(stack: LayerStack, *, seed: int, device: str) -> LayerStack:
    """The stack with real weights, with tied parameters sharing memory again."""
    layers = tuple(
        materialize_layer(stack, index, seed=seed, device=device)
        for index in range(len(stack.layers))
    )
    by_name = {
        f"{name}.{path}": (layer, path)
        for name, layer in zip(stack.names, layers, strict=True)
        for path, _ in layer.named_parameters(remove_duplicate=False)
    }
    for tied, owner in stack.tied_weights.items():
        owner_layer, owner_path = by_name[owner]
        layer, path = by_name[tied]
        set_parameter(layer, path, owner_layer.get_parameter(owner_path))
    return replace(stack, layers=layers)
