"""The small files of an export: configuration and tokenizer."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from windlass.errors import ModelError
from windlass.jobs.objects import NO_OBJECTS, model_arguments
from windlass.models import (
    ResNetConfig,
    TransformerConfig,
    apply_model_arguments,
    apply_resnet_arguments,
    has_config,
    is_causal,
    model_config,
    resnet_config,
    runs_by_transformers,
)
from windlass.schema import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, ModelIdentity


def write_small_files(identity: ModelIdentity, tokenizer: Path, folder: Path) -> None:
    """Writes the small files that an export has: the tokenizer's, and the model's configuration.

    A model that Hugging Face does not know has no configuration, and the tokenizer's stand alone.

    Args:
        tokenizer: the `tokenizer.json` of its run.
        folder: receives the files.

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
