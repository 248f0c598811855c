"""What the folder of a run keeps of its data, and how its text is known again."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from windlass.atomic_files import cache_folder, storage_errors
from windlass.models import find_model_folder, is_huggingface
from windlass.schema import (
    CHAT_TEMPLATE_FILE,
    EXAMPLES_FILE,
    GENERATION_CONFIG_FILE,
    MODEL_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
    TOKENS_FOLDER,
    Request,
)

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, TokenDataset


def requested_text_fingerprint(request: Request) -> str:
    """The fingerprint of the text or images that a request names, however they are prepared.

    Raises:
        DataError: they are missing or cannot be read.
    """
    from windlass.data import image_fingerprint, labelled_fingerprint, text_fingerprint

    if request.data.format == "classes":
        return labelled_fingerprint(request.data)
    if request.data.format == "images":
        return image_fingerprint(request.data, cache=cache_folder() / "images")
    return text_fingerprint(request.data, cache=cache_folder() / "tokens")


def load_run_tokens(folder: Path) -> "TokenDataset | ExampleDataset | None":
    """The tokens or examples that lie in a run folder itself; None if there are none."""
    from windlass.data import load_examples, open_dataset

    return load_examples(folder / EXAMPLES_FILE) or open_dataset(folder / TOKENS_FOLDER)


def save_run_data(tokens: "TokenDataset | ExampleDataset", folder: Path) -> tuple[str, ...]:
    """Writes what a run folder keeps of its data, and returns the names of the files.

    Examples are kept as they are, but for images that their source holds; of a text, which its
    source holds, only the tokenizer, and of conversations their template.
    """
    from windlass.data import ExampleDataset

    if isinstance(tokens, ExampleDataset):
        if tokens.content is not None:
            return ()
        with storage_errors(folder / EXAMPLES_FILE):
            tokens.save(folder / EXAMPLES_FILE)
        if tokens.tokenizer is None:
            return (EXAMPLES_FILE,)
        return (EXAMPLES_FILE, *tokens.tokenizer.save(folder / TOKENIZER_FILE))
    files = tokens.tokenizer.save(folder / TOKENIZER_FILE)
    if tokens.conversations is None:
        return files
    tokens.conversations.template.save(folder)
    return (TOKENIZER_FILE, CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE)


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
