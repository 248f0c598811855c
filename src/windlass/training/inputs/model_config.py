"""The shape of a Hugging Face model in the folder of a run, which outlives the model's own."""

import shutil
from pathlib import Path
from typing import TypeVar

from windlass.atomic_files import storage_errors
from windlass.models import find_model_folder, is_huggingface
from windlass.schema import GENERATION_CONFIG_FILE, MODEL_CONFIG_FILE, TOKENIZER_FILE, Request

_Request = TypeVar("_Request", bound=Request)


def save_model_config(name: str, folder: Path) -> tuple[str, ...]:
    """Copies `config.json` and `generation_config.json` of a model of Hugging Face.

    Returns the names of the files.
    """
    if not is_huggingface(name):
        return ()
    config = find_model_folder(name).config
    sources = {MODEL_CONFIG_FILE: config}
    generation = config.with_name(GENERATION_CONFIG_FILE)
    sources |= {GENERATION_CONFIG_FILE: generation} if generation.is_file() else {}
    for copy, source in sources.items():
        with storage_errors(folder / copy):
            shutil.copyfile(source, folder / copy)
    return tuple(sources)


def with_saved_config(request: _Request, folder: Path) -> _Request:
    """The request with the copies of a run folder in place of a model's folder that is gone."""
    name, config = request.model.name, (folder / MODEL_CONFIG_FILE).absolute()
    if not is_huggingface(name) or not config.is_file():
        return request
    gone = Path(name.removeprefix("hf:")).expanduser()
    if gone.exists():
        return request
    model = request.model.model_copy(update={"name": f"hf:{config}"})
    data, tokenizer = request.data, (folder / TOKENIZER_FILE).absolute()
    named = Path(data.tokenizer).expanduser()
    if named.suffix == ".json" and not named.is_file() and tokenizer.is_file():
        data = data.model_copy(update={"tokenizer": str(tokenizer)})
    return request.model_copy(update={"model": model, "data": data})
