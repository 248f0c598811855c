"""The data of a run: prepared or from the cache, and what its folder keeps of them."""

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.machines import Progress
from windlass.api.objects import model_arguments
from windlass.atomic_files import cache_folder, storage_errors
from windlass.errors import DataError
from windlass.models import (
    apply_model_arguments,
    class_names,
    model_config,
    predicts_text_classes,
)
from windlass.schema import (
    CHAT_TEMPLATE_FILE,
    EXAMPLES_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
    TOKENS_FOLDER,
    Request,
)
from windlass.torch_ext import trim_heap

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, TokenDataset


def prepare_data(request: Request, progress: Progress | None) -> "TokenDataset | ExampleDataset":
    """The tokens of a request's text, or its images: from the cache, or prepared now.

    Raises:
        DataError: the data are missing, empty or too few.
    """
    if request.data.format == "images":
        from windlass.data import prepare_images

        return prepare_images(request.data, cache=cache_folder() / "images", progress=progress)
    if request.data.format == "classes":
        return _labelled_texts(request)
    return prepare_tokens(request, progress)


def _labelled_texts(request: Request) -> "ExampleDataset":
    """Texts with classes, as the request's model takes them.

    Raises:
        DataError: the model says no class of a text, or there are no such texts.
    """
    from windlass.data import prepare_labelled_texts

    name, arguments = request.model.name, model_arguments(request.model)
    if not predicts_text_classes(name, arguments):
        raise DataError(
            f"`data.format` = classes, and `{name}` says no class of a text; set `model.classes` "
            "of a model such as `bert-base`"
        )
    config = apply_model_arguments(model_config(name), arguments)
    own = class_names(name)
    return prepare_labelled_texts(
        request.data, sequence=request.train.sequence or config.sequence,
        vocabulary=config.vocabulary,
        classes=own if own is not None and len(own) == config.text_classes else None,
    )  # fmt: skip


def prepare_tokens(request: Request, progress: Progress | None) -> "TokenDataset":
    """The tokens of a request's text: from the cache, or tokenized now.

    Raises:
        DataError: the text is missing, empty or too short, or the request names images.
    """
    from windlass.data import prepare_dataset

    if request.data.format in ("images", "classes"):
        raise DataError(
            f"`data.format` = {request.data.format}, and that has no running text; name text here"
        )
    tokens = prepare_dataset(request.data, cache=cache_folder() / "tokens", progress=progress)
    trim_heap()
    return tokens


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

    Raises:
        StorageError: the disk is full.
    """
    from windlass.data import ExampleDataset

    if isinstance(tokens, ExampleDataset):
        if tokens.content is not None:
            return ()
        with storage_errors(folder / EXAMPLES_FILE):
            tokens.save(folder / EXAMPLES_FILE)
        if tokens.tokenizer is None:
            return (EXAMPLES_FILE,)
        tokens.tokenizer.save(folder / TOKENIZER_FILE)
        return (EXAMPLES_FILE, TOKENIZER_FILE)
    tokens.tokenizer.save(folder / TOKENIZER_FILE)
    if tokens.conversations is None:
        return (TOKENIZER_FILE,)
    tokens.conversations.template.save(folder)
    return (TOKENIZER_FILE, CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE)
