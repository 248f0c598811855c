"""What the folder of a run keeps of its data, and how its text is known again."""

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.atomic_files import cache_folder, storage_errors
from windlass.schema import (
    CHAT_TEMPLATE_FILE,
    EXAMPLES_FILE,
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
