"""Prepares the images of a request once, and finds them again by the content of their files."""

import hashlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from windlass.atomic_files import atomic_folder, atomic_write, hash_file, one_process
from windlass.data.content_hashes import DataProgress, hash_files
from windlass.data.corpus_split import hash_fraction
from windlass.data.examples import ExampleDataset
from windlass.data.images.image_sources import ImageSource, decode_image, find_images
from windlass.data.pixels import Images, PixelScale, channel_statistics
from windlass.document import Document
from windlass.errors import DataError, raise_data_errors
from windlass.schema import DataRequest

_FORMAT = 1
"""Version number, raised when the same images would be read, scaled or split differently."""
_META, _IMAGES, _LABELS = "meta.json", "images.npy", "labels.npy"
_MAX_ERRORS = 20


class ImageRecipe(Document):
    """Everything that prepared images depend on; its fingerprint names their folder."""

    format: int = _FORMAT
    sources: tuple[str, ...]
    """A hash of the files of each source, the one for validation last."""
    shape: tuple[int, int, int]
    held_out: float | None
    """Share of images to hold out; None with a source for validation."""
    fields: tuple[str, str]


class ImageMeta(Document):
    """What was prepared, and the hashes of its files."""

    classes: tuple[str, ...]
    """Names of the classes, in the order of their numbers."""
    held_out: int
    """Number of images at the end that are never trained on."""
    mean: tuple[float, ...]
    """Mean of each channel of the training images, of pixels up to 1."""
    std: tuple[float, ...]
    sha256: tuple[str, str]
    """Hashes of images and labels."""


def prepare_images(
    data: DataRequest, *, cache: Path, progress: DataProgress | None = None
) -> ExampleDataset:
    """The images of a request, from the cache if their files were prepared like this before.

    Raises:
        DataError: a source is missing or has no images, or there is nothing to hold out.
    """
    report = progress or (lambda *_: None)
    names = (*data.sources, *((data.validation,) if data.validation is not None else ()))
    sources = [find_images(name, data) for name in names]
    shape = _shape(data)
    recipe = ImageRecipe(
        sources=tuple(_source_hash(source, cache, report) for source in sources),
        shape=shape,
        held_out=data.held_out if data.validation is None else None,
        fields=(data.image_field, data.label_field),
    )
    folder = cache / recipe.fingerprint()
    lock = folder.with_name(f".{folder.name}.lock")
    if not (folder / _META).is_file():
        with one_process(lock, lambda: report("waiting for another process", 0, None)):
            if not (folder / _META).is_file():  # another process may have prepared them meanwhile
                _prepare(folder, sources, data, shape, report)
    return _open(folder, data)


def image_fingerprint(data: DataRequest, *, cache: Path) -> str:
    """Twelve hexadecimal digits of the names and contents of a request's images.

    Raises:
        DataError: a source is missing or cannot be read.
    """
    names = (*data.sources, *((data.validation,) if data.validation is not None else ()))
    hashes = [_source_hash(find_images(name, data), cache, lambda *_: None) for name in names]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:12]


def count_images(data: DataRequest) -> int:
    """Number of images to train on, about; none of them is read.

    Raises:
        DataError: a source is missing or has no images.
    """
    count = sum(1 for name in data.sources for _ in find_images(name, data).labels())
    share = 1.0 if data.validation is not None else 1 - data.held_out
    return max(1, round(share * count))


def _shape(data: DataRequest) -> tuple[int, int, int]:
    """The shape that images are scaled to."""
    if data.image_shape is None or data.image_shape[0] not in (1, 3):
        shape = data.image_shape and list(data.image_shape)
        raise DataError(
            f"`data.image_shape` is {shape}, and images have 1 or 3 channels, a height and a "
            "width, such as [3, 224, 224]"
        )
    return data.image_shape


def _source_hash(source: ImageSource, cache: Path, progress: DataProgress) -> str:
    """A hash of the names and contents of a source's files, or its name if it has none."""
    if not source.files:
        return source.source
    hashed = hash_files(source.files, cache, progress)
    content = "\n".join(f"{file.sha256} {file.name}" for file in hashed)
    return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()


def _prepare(
    folder: Path,
    sources: Sequence[ImageSource],
    data: DataRequest,
    shape: tuple[int, int, int],
    progress: DataProgress,
) -> None:
    """Builds a folder of images."""
    labels = [list(source.labels()) for source in sources]
    classes = _class_order({label for part in labels for _, label in part})
    number = {label: index for index, label in enumerate(classes)}
    places, held_out = _split(labels, data, classes)
    with atomic_folder(folder, replaces=True) as temporary:
        every = [label for part in labels for _, label in part]
        targets = np.empty(len(every), dtype=np.int64)
        targets[places] = [number[label] for label in every]
        images = open_memmap(
            temporary / _IMAGES, mode="w+", dtype=np.uint8, shape=(len(every), *shape)
        )
        _read_images(images, sources, labels, places, progress)
        images.flush()
        np.save(temporary / _LABELS, targets)
        mean, std = channel_statistics(images[: len(images) - held_out])
        hashes = (hash_file(temporary / _IMAGES), hash_file(temporary / _LABELS))
        meta = ImageMeta(classes=classes, held_out=held_out, mean=mean, std=std, sha256=hashes)
        atomic_write(temporary / _META, meta.to_json())


def _class_order(labels: set[str]) -> tuple[str, ...]:
    """Classes by name, or by number if all are numbers."""
    is_number = all(label.isdecimal() for label in labels)
    return tuple(sorted(labels, key=int if is_number else str))


def _split(
    labels: Sequence[Sequence[tuple[str, str]]], data: DataRequest, classes: tuple[str, ...]
) -> tuple[list[int], int]:
    """The place of each image, those that are held out last, and the number of these."""
    split = [
        hash_fraction(name, "split") < data.held_out
        if data.validation is None
        else index == len(labels) - 1
        for index, part in enumerate(labels)
        for name, _ in part
    ]
    held_out, training = sum(split), len(split) - sum(split)
    every = [label for part in labels for _, label in part]
    learned = {label for label, is_held_out in zip(every, split, strict=True) if not is_held_out}
    unknown = [label for label in classes if label not in learned]
    source = ", ".join(f"`{name}`" for name in data.sources)
    if len(classes) < 2:
        raise DataError(f"{source} has {len(classes)} class, and a model learns to tell several")
    if not held_out or not training:
        raise DataError(
            f"{source} has {training} images to train on and {held_out} that are held out, and "
            "each needs one; change `data.held_out`, or name images as `data.validation`"
        )
    if unknown:
        raise DataError(
            f"no image of {len(unknown)} classes is trained on, such as `{unknown[0]}`; name more "
            "images, or lower `data.held_out`"
        )
    first, second = iter(range(training)), iter(range(training, len(split)))
    return [next(second if is_held_out else first) for is_held_out in split], held_out


def _read_images(
    images: Images,
    sources: Sequence[ImageSource],
    labels: Sequence[Sequence[tuple[str, str]]],
    places: Sequence[int],
    progress: DataProgress,
) -> None:
    """Reads every image into its place."""
    errors: list[str] = []
    named = (
        (source.source, name)
        for source, part in zip(sources, labels, strict=True)
        for name, _ in part
    )
    raw = chain.from_iterable(source.images() for source in sources)
    for index, ((source, name), image) in enumerate(zip(named, raw, strict=True)):
        try:
            images[places[index]] = decode_image(image, images.shape[1:])
        except DataError as error:
            errors.append(f"`{name}` of `{source}` {error}")
        if len(errors) == _MAX_ERRORS:
            errors.append(f"and maybe more; reading stopped after {_MAX_ERRORS}")
            break
        if index % 64 == 0:
            progress("reading images", index, len(images))
    raise_data_errors(errors)


def _open(folder: Path, data: DataRequest) -> ExampleDataset:
    """Prepared images, memory-mapped."""
    meta = ImageMeta.model_validate_json((folder / _META).read_bytes())
    scale = PixelScale(
        mean=data.image_mean or meta.mean,
        std=data.image_std or meta.std,
        flips=data.flips,
        border=data.border,
    )
    return ExampleDataset(
        inputs=np.load(folder / _IMAGES, mmap_mode="r").view(np.ndarray),
        targets=np.load(folder / _LABELS),
        held_out=meta.held_out,
        pixels=scale,
        content=" ".join(meta.sha256),
    )
