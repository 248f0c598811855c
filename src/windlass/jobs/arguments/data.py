"""What a caller passes as `data`: a source, texts, token ids, pairs, or a data set of torch's."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from windlass.atomic_files import atomic_write, cache_folder
from windlass.errors import DataError, RequestError
from windlass.jobs.objects import IN_MEMORY
from windlass.models import has_config
from windlass.schema import Request

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def with_data(request: Request, data: object) -> tuple[Request, Iterable[object] | None]:
    """The request for some data, and the data themselves if they are tensors.

    Args:
        request: what is asked for beside the data.
        data: a source as `data.source` names it, texts, token ids, or pairs of inputs and targets;
            or a data set or `DataLoader` of torch's that has these as its items.

    Raises:
        DataError: the data have no item.
        RequestError: they are nothing that can be iterated over.
    """
    if isinstance(data, str | Path):
        return _with_source(request, str(data)), None
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise RequestError(
            f"data are the name of a source, texts, token ids, or pairs of them, not a "
            f"`{type(data).__name__}`"
        )
    train, examples = request.train, _examples(data)
    if _is_loader(data) and train.batch is None:
        train = train.model_copy(update={"batch": cast("DataLoader[Any]", data).batch_size})
    items = iter(examples)
    first: Any = next(items, None)
    if first is None:
        raise DataError("the data have no item; pass texts, token ids, or pairs of token ids")
    if isinstance(first, str):
        request = request.model_copy(update={"train": train})
        return _with_source(request, _write_texts([first, *cast("Iterator[str]", items)])), None
    sequence = train.sequence
    if isinstance(first, tuple | list) and len(first) == 2 and hasattr(first[0], "__len__"):
        shape = number_shape(first)
        if shape is not None:
            request = _with_input_shape(request, *shape)
        else:
            sequence = sequence or len(first[0])
    train = train.model_copy(update={"sequence": sequence})
    request = _with_source(request.model_copy(update={"train": train}), IN_MEMORY)
    return request, examples if hasattr(examples, "__len__") else _again(first, items)


class _Items:
    """Items that can be iterated over again, and whose number is known.

    Args:
        begin: returns an iterator over all of them.
    """

    def __init__(self, begin: Callable[[], Iterator[object]], length: int) -> None:
        self._begin, self._length = begin, length

    def __iter__(self) -> Iterator[object]:
        return self._begin()

    def __len__(self) -> int:
        return self._length


def _examples(data: object) -> Iterable[object]:
    """The examples of data: of a map-style data set all items, and those of a loader's batches."""
    if _is_loader(data):
        loader = cast("DataLoader[Any]", data)
        length = _length(loader.dataset)
        return _parts(loader) if length is None else _Items(partial(_parts, loader), length)
    length = None if hasattr(data, "__iter__") else _length(data)
    if length is None:
        return cast("Iterable[object]", data)
    # Python would ask for items until one is refused, which such a data set need not do.
    item = cast("Mapping[int, object]", data).__getitem__
    return _Items(lambda: map(item, range(length)), length)


def _parts(loader: "DataLoader[Any]") -> Iterator[object]:
    """The examples of each batch of a loader."""
    if loader.batch_size is None and loader.batch_sampler is None:
        yield from loader
        return
    for loaded in loader:
        # A data set of one tensor makes lists with one.
        batch = loaded[0] if isinstance(loaded, list) and len(loaded) == 1 else loaded
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        if is_pair and all(hasattr(part, "shape") for part in batch):
            yield from zip(*batch, strict=True)
        elif hasattr(batch, "shape") or (
            isinstance(batch, list) and all(isinstance(text, str) for text in batch)
        ):
            yield from batch
        else:
            kind = type(batch).__name__
            if isinstance(batch, tuple | list):
                kind = f"{kind} of {', '.join(type(part).__name__ for part in batch[:4])}"
            raise DataError(
                f"the batches of the `DataLoader` are of type `{kind}`, not of token ids `[b, s]`, "
                "or of inputs with their targets; pass a data set of such pairs"
            )


def _length(data: object) -> int | None:
    """The number of items; None if it is not known."""
    try:
        return len(data)  # type: ignore[arg-type]  # it raises where that is so
    except (TypeError, NotImplementedError):
        return None


def _is_loader(data: object) -> bool:
    """Whether a value is a `DataLoader` of torch's; answers without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.utils.data.DataLoader)


def number_shape(pair: "tuple[Any, Any] | list[Any]") -> tuple[tuple[int, ...], bool] | None:
    """Shape of the inputs of a pair, and whether its target is of numbers; None for token ids.

    Raises:
        DataError: it is a batch of pairs of token ids.
    """
    import numpy as np

    from windlass.data import is_numbers

    if not is_numbers(pair[0]):
        return None
    inputs, targets = map(np.asarray, pair)
    if inputs.ndim == 2 and inputs.dtype.kind in "iu" and inputs.shape == targets.shape:
        raise DataError(
            f"the first item of the data looks like a batch of {len(inputs)} pairs of token ids; "
            "pass each pair as an item, or the `DataLoader` that makes the batches"
        )
    return np.shape(pair[0]), np.asarray(pair[1]).dtype.kind == "f"


def _with_input_shape(request: Request, shape: tuple[int, ...], has_numbers: bool) -> Request:
    """The request for a model that takes such inputs, unless it says what it takes."""
    own: dict[str, object] = {}
    if request.model.input_shape is None and not has_config(request.model.name):
        own = {"input_shape": shape, "predicts": "numbers" if has_numbers else None}
    return request.model_copy(update={"model": request.model.model_copy(update=own)})


def _again(first: object, rest: Iterable[object]) -> Iterable[object]:
    yield first
    yield from rest


def _with_source(request: Request, source: str) -> Request:
    data = request.data.model_copy(update={"source": source})
    return request.model_copy(update={"data": data})


def _write_texts(texts: Iterable[str]) -> str:
    """A file with the texts, one document each, named by their content."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    name = hashlib.sha256(lines.encode()).hexdigest()[:16]
    path = cache_folder() / "texts" / f"{name}.jsonl"
    if not path.is_file():
        atomic_write(path, lines)
    return str(path)
