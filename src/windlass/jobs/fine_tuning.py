"""Adapters of a PEFT folder as a request: their base, layers, ranks and scale."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from windlass.errors import ModelError, RequestError, shorten
from windlass.jobs.objects import NO_OBJECTS, model_arguments
from windlass.models import (
    ResNetConfig,
    TransformerConfig,
    apply_model_arguments,
    apply_resnet_arguments,
    has_config,
    is_causal,
    is_huggingface,
    is_residual,
    model_config,
    resnet_config,
    runs_by_transformers,
)
from windlass.schema import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, LoraRequest, ModelIdentity, Request

_FREE = {"adapter", "base", "dropout"}
"""Keys of `lora` that may stand beside `adapter`."""


def with_peft_adapters(request: Request) -> Request:
    """The request with all that the folder of `lora.adapter` says; itself if it names none.

    Raises:
        RequestError: it says itself what the folder says.
        ModelError: there is no such folder, or its adapters are those of another base.
        InputErrors: everything that makes an adapter more than two factors beside a product.
    """
    lora = request.lora
    if lora is not None and lora.adapter is None:
        return _with_own_targets(request, lora)
    if lora is None or lora.adapter is None or lora.targets is not None:
        return request
    given = sorted(lora.model_fields_set - _FREE)
    if given:
        keys = " and ".join(f"`lora.{key}`" for key in given)
        raise RequestError(f"{keys} with `lora.adapter`, whose folder says that; leave it out")
    name, base = request.model.name, ModelIdentity.model_validate(request.model.model_dump())
    by_transformers = runs_by_transformers(name)
    if not has_config(name) and not by_transformers:
        raise ModelError(
            f"`lora.adapter` with `{name}`, a model of your own, which PEFT does not know; "
            "leave it out"
        )
    from windlass.models import fitting_adapters, saved_classes

    folder = Path(lora.adapter).expanduser().resolve()
    config = None if by_transformers else _config(name, base)
    stack = NO_OBJECTS.stack(base, seed=None)
    classes = None if config is None else saved_classes(config, stack, folder)
    if config is not None and classes is not None and base.classes is None:
        # The folder has a head of its own, whose classes its configuration does not count.
        base = base.model_copy(update={"classes": classes})
        config, stack = _config(name, base), NO_OBJECTS.stack(base, seed=None)
    adapters = fitting_adapters(config, stack, folder)
    read = adapters.request(lora.dropout if "dropout" in lora.model_fields_set else None)
    update: dict[str, object] = {"lora": read.model_copy(update={"base": lora.base})}
    if base.classes != request.model.classes:
        update["model"] = request.model.model_copy(update={"classes": base.classes})
    return request.model_copy(update=update)


def _with_own_targets(request: Request, lora: LoraRequest) -> Request:
    """The request with targets in our names where they are those of PEFT."""
    name, base = request.model.name, ModelIdentity.model_validate(request.model.model_dump())
    if not lora.targets or not is_huggingface(name) or is_residual(name):
        return request
    from windlass.models import own_targets

    config = None if runs_by_transformers(name) else _config(name, base)
    targets = own_targets(config, NO_OBJECTS.stack(base, seed=None), lora.targets)
    if targets == lora.targets:
        return request
    return request.model_copy(update={"lora": lora.model_copy(update={"targets": targets})})


def _config(name: str, base: ModelIdentity) -> TransformerConfig:
    return apply_model_arguments(model_config(name), model_arguments(base))


def base_of_adapters(folder: Path) -> str:
    """The name of the model that a PEFT folder's adapters were trained beside, `hf:DIR`.

    Raises:
        ModelError: it is no such folder, or its base is none of this machine.
        InputErrors: everything that makes an adapter more than two factors beside a product.
    """
    from windlass.models import peft_config

    base = peft_config(folder).base_model_name_or_path
    if not base or not Path(base).expanduser().is_dir():
        what = "does not say its base" if not base else f"was trained beside `{shorten(base)}`"
        raise ModelError(
            f"`{folder}` {what}, which is no folder here; name the base: "
            f"`windlass train hf:DIR lora.adapter={folder}`"
        )
    return f"hf:{base}"


def with_trained_head(request: Request) -> Request:
    """The request, which says of adapters beside a drawn head of classes that this is trained.

    An adapter changes what a layer has learned, and a head that was just drawn has learned nothing.

    Raises:
        ModelError: there is no such model.
        InputErrors: every tensor of its folder that does not fit.
    """
    lora, name = request.lora, request.model.name
    if lora is None or lora.trained is not None or lora.base is not None or not has_config(name):
        return request
    model = ModelIdentity.model_validate(request.model.model_dump())
    config = apply_model_arguments(model_config(name), model_arguments(model))
    if config.image is None and config.text_classes is None:
        return request
    stack = NO_OBJECTS.stack(model, seed=None)
    head, layer = stack.names[-1], stack.layers[-1]
    stored = frozenset[str]() if stack.weights is None else stack.weights.parameters
    names = (f"{head}.{path}" for path, _ in layer.named_parameters())
    drawn = tuple(name for name in names if name not in stored)
    update = {"lora": lora.model_copy(update={"trained": drawn or None})}
    return request.model_copy(update=update)


def write_small_files(identity: ModelIdentity, tokenizer: Path, folder: Path) -> None:
    """Writes the small files that an export has: the tokenizer's, and the model's configuration.

    A model that Hugging Face does not know has no configuration, and the tokenizer's stand alone.

    Args:
        tokenizer: the `tokenizer.json` of its run.

    Raises:
        WindlassError: the model's folder is gone, or a file of it cannot be read.
    """
    from windlass.models import export_layout, transformers_layout

    special = special_tokens(identity.name, tokenizer)
    template = tokenizer.with_name(CHAT_TEMPLATE_FILE)
    files: Mapping[str, bytes] = {}
    if runs_by_transformers(identity.name):
        stack = NO_OBJECTS.stack(identity, seed=None)
        files = transformers_layout(
            identity.name, stack, tokenizer=tokenizer, special_tokens=special
        ).files
    elif has_config(identity.name):
        with contextlib.suppress(ModelError):  # no type of theirs has this shape
            files = export_layout(
                exported_config(identity), {}, tokenizer=tokenizer, special_tokens=special,
                chat_template=template.read_bytes() if template.is_file() else None,
            ).files  # fmt: skip
    if not files:
        names = {name: text for name, (_, text) in special.items()}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        files = {
            TOKENIZER_FILE: tokenizer.read_bytes(),
            "tokenizer_config.json": json.dumps(settings).encode(),
        }
    for name, content in files.items():
        (folder / name).write_bytes(content)


def special_tokens(model: str, tokenizer: Path | None) -> dict[str, tuple[int, str]]:
    """Id and text of the special tokens of a model that writes text; none for another one."""
    from windlass.data import load_tokenizer

    if tokenizer is None or not is_causal(model):
        return {}
    loaded = load_tokenizer(tokenizer)
    end = str(loaded.backend.id_to_token(loaded.end_of_text))
    ids = loaded.backend.get_vocab()
    return {name: (ids[text], text) for name, text in {"eos_token": end, **loaded.special}.items()}


def exported_config(identity: ModelIdentity) -> TransformerConfig | ResNetConfig:
    """The configuration that a model was trained in.

    Raises:
        ModelError: it cannot be built any more.
    """
    arguments = model_arguments(identity)
    residual = resnet_config(identity.name)
    if residual is not None:
        return apply_resnet_arguments(residual, arguments)
    return apply_model_arguments(model_config(identity.name), arguments)
