"""Adapters of a PEFT folder as a request: their base, layers, ranks and scale."""

from pathlib import Path

from windlass.errors import ModelError, RequestError, shorten
from windlass.jobs.objects import NO_OBJECTS, model_arguments
from windlass.models import (
    TransformerConfig,
    apply_model_arguments,
    has_config,
    is_huggingface,
    is_residual,
    model_config,
    runs_by_transformers,
)
from windlass.schema import LoraRequest, ModelIdentity, Request

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
    """The request with targets in our names where they are those of PEFT.

    Raises:
        ModelError: a target is a part of a layer of ours alone, or no layer.
    """
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
    from windlass.models import open_peft_folder

    base = open_peft_folder(folder).base
    if base is None or not Path(base).expanduser().is_dir():
        what = "does not say its base" if base is None else f"was trained beside `{shorten(base)}`"
        raise ModelError(
            f"`{folder}` {what}, which is no folder here; name the base: "
            f"`windlass train hf:DIR lora.adapter={folder}`"
        )
    return f"hf:{base}"
