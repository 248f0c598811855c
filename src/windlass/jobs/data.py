"""The data that a request names: prepared, counted or estimated."""

from dataclasses import replace
from typing import TYPE_CHECKING

from windlass.atomic_files import cache_folder
from windlass.errors import DataError, InputErrors
from windlass.jobs.known_machines import HERE, Progress
from windlass.jobs.objects import IN_MEMORY, model_arguments
from windlass.models import (
    apply_model_arguments,
    class_names,
    is_pretrained,
    model_config,
    predicts_text_classes,
)
from windlass.schema import BYTE_ENTRIES, DataRequest, DataSize, Request
from windlass.torch_ext import trim_heap

if TYPE_CHECKING:
    from windlass.data import DatasetStatistics, ExampleDataset, TokenDataset

_HUB = "hf:"
_MOST_COUNTED_BYTES = 256 * 2**20
"""Size of the largest text whose tokens are counted before a run needs them."""
_BYTES_PER_TOKEN = {"byte": 1.0, "bpe": 3.4}
_OTHER_BYTES_PER_TOKEN = 4.0
"""Bytes of text that a token stands for, about: a tokenizer of 4,096 entries on the standard
library has 3.4, those of published models about 4."""
_MULTIPLE = 8
"""Sequences that follow from data have a multiple of so many tokens, as kernels like them."""
_SEQUENCES_HELD_OUT = 2
"""Fewest sequences that a default leaves in each side of a short text."""


def data_statistics(request: Request, *, progress: Progress | None = None) -> "DatasetStatistics":
    """The statistics of a request's text, which is tokenized first unless it was before.

    Args:
        request: its `data` counts.
        progress: called with how far reading and tokenizing are.

    Raises:
        DataError: a text is missing, empty or too short.
        InputErrors: several documents cannot be read.
    """
    from windlass.data import dataset_statistics

    return dataset_statistics(request.data, prepare_tokens(request, progress))


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


def measure_data(
    request: Request, *, fine_tunes: bool, progress: Progress | None = None
) -> DataSize | None:
    """How much there is to train on, where a default follows from it.

    Fine-tuning takes its steps from passes over the data, and conversations set the length of a row
    by their longest one.

    Args:
        fine_tunes: whether the weights are trained already; those of a Hugging Face folder are.

    Returns:
        Their size; None if nothing that the request leaves open follows from it, or if they are not
        on this machine or cannot be read, which a run will say.
    """
    train, data = request.train, request.data
    fine_tunes = fine_tunes or is_pretrained(request.model.name) or request.lora is not None
    opens_size = train.sequence is None or train.batch is None or train.steps is None
    needs_sequence = data.format == "chat" and train.sequence is None
    if not (fine_tunes and opens_size) and not needs_sequence:
        return None
    if data.source == IN_MEMORY or (request.machine != HERE and _is_on_hub(data)):
        return None
    size = estimate_data(data) if has_own_text(data) else _counted(request, progress)
    return size and replace(size, by_epochs=fine_tunes)


def has_own_text(data: DataRequest) -> bool:
    """Whether a request names no text, and takes that which every machine has."""
    return data.format == "text" and "source" not in data.model_fields_set


def estimate_data(data: DataRequest) -> DataSize | None:
    """How much text the files of a request hold, by their size alone.

    Returns:
        None if the files are not on this machine, or hold no text.
    """
    if data.format in ("images", "classes") or data.source == IN_MEMORY or _is_on_hub(data):
        return None
    from windlass.data import corpus_bytes

    try:
        nbytes = corpus_bytes(data)
    except (DataError, InputErrors):
        return None
    per_token = _BYTES_PER_TOKEN.get(data.tokenizer, _OTHER_BYTES_PER_TOKEN)
    per_token = 1.0 if data.vocabulary == BYTE_ENTRIES else per_token
    share = 1.0 if data.validation is not None else 1 - data.held_out
    return DataSize(
        tokens=max(1, round(share * nbytes / per_token)),
        is_named=not has_own_text(data),
        is_estimate=True,
    )


def size_of(data: "TokenDataset | ExampleDataset", request: Request) -> DataSize:
    """How much there is to train on in data that are prepared."""
    from windlass.data import ExampleDataset

    is_named = not has_own_text(request.data)
    if isinstance(data, ExampleDataset):
        return DataSize(rows=len(data.inputs) - data.held_out, is_named=is_named)
    tokens = data.meta.train.tokens
    if data.conversations is None:
        sides = [*(part.tokens for part in data.meta.train.sources), data.meta.held_out.tokens]
        most = min(sides) // _SEQUENCES_HELD_OUT
        sequence = max(most - most % _MULTIPLE, min(most, _MULTIPLE))
        return DataSize(tokens=tokens, sequence=sequence, is_named=is_named)
    longest = max(data.documents.longest, data.held_out_documents.longest) - 1
    sequence = -(-longest // _MULTIPLE) * _MULTIPLE
    if request.data.packing:
        # Rows are filled, and their number follows from their length, as that of a text's does.
        return DataSize(tokens=tokens, is_named=is_named)
    rows = data.meta.train.documents
    return DataSize(tokens=tokens, rows=rows, sequence=sequence, is_named=is_named)


def _counted(request: Request, progress: Progress | None) -> DataSize | None:
    """The size of data that are prepared for it, or of a large text the estimate."""
    data = request.data
    try:
        if data.format == "images":
            from windlass.data import count_images

            return DataSize(rows=count_images(data))
        if data.format == "text":
            estimate = estimate_data(data)
            if estimate is None or (estimate.tokens or 0) > _MOST_COUNTED_BYTES / 4:
                return estimate
        return size_of(prepare_data(request, progress), request)
    except (DataError, InputErrors):
        return None


def _is_on_hub(data: DataRequest) -> bool:
    return any(name.startswith(_HUB) for name in data.sources)


def _labelled_texts(request: Request) -> "ExampleDataset":
    """Texts with classes, as the request's model takes them."""
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
