"""Finds images with their classes: folders of a class each, tables, and scikit-learn's digits."""

import importlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from windlass.data.files import arrow_batches
from windlass.data.readers import SourceFile
from windlass.data.sources import find_corpus
from windlass.errors import DataError, did_you_mean
from windlass.schema import DataRequest

DIGITS = "digits"
"""The 1,797 images of 8 x 8 pixels that scikit-learn has with it (Alpaydin and Kaynak 1998)."""
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
_DIGIT_LEVELS = 16

RawImage = bytes | npt.NDArray[np.uint8]
"""The bytes of an image file, or pixels `[h w]`."""


class ImageSource(Protocol):
    """The images of a source, which are read anew whenever they are asked for."""

    @property
    def source(self) -> str:
        """The source as the request names it."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files that the images are read from."""

    def labels(self) -> Iterator[tuple[str, str]]:
        """Name and class of each image, in an order that is the same on every machine."""

    def images(self) -> Iterator[RawImage]:
        """The images in the same order."""


def find_images(name: str, data: DataRequest) -> ImageSource:
    """Finds the images of a source.

    Args:
        name: `digits`, a folder with a folder for each class, a Parquet file or a folder of them, a
            folder saved by Hugging Face `datasets`, or `hf:name`.
        data: says which columns of a table hold image and class.

    Raises:
        DataError: there is no such source, or it has no images.
    """
    if name == DIGITS:
        return _Digits()
    path = Path(name).expanduser()
    if path.is_dir() and (folders := _class_folders(path)):
        return _ClassFolders(source=name, folders=folders)
    if path.is_dir() and any(_image_files(path)):
        raise DataError(
            f"the images of `{name}` lie in no folder of their class; put them into `{name}/CLASS/`"
        )
    if not path.exists() and not name.startswith("hf:"):
        near = path.parent.iterdir() if path.parent.is_dir() else ()
        hint = did_you_mean(name, [DIGITS, *(str(entry) for entry in near)])
        raise DataError(f"no images `{name}`{hint}")
    corpus = find_corpus(name).tables()
    if not corpus.files or any(
        file.table_format() not in (".parquet", ".arrow") for file in corpus.files
    ):
        raise DataError(
            f"no images in `{name}`: it has no folder of images for each class, and no Parquet file"
        )
    return _Table(
        source=name, files=corpus.files, image_field=data.image_field, label_field=data.label_field
    )


class _Digits:
    """Scikit-learn's digits."""

    source = DIGITS
    files: tuple[SourceFile, ...] = ()

    def labels(self) -> Iterator[tuple[str, str]]:
        for index, target in enumerate(self._bunch().target.tolist()):
            yield f"digit {index}", str(target)

    def images(self) -> Iterator[RawImage]:
        levels = self._bunch().images
        yield from np.rint(levels * (255 / _DIGIT_LEVELS)).astype(np.uint8)

    def _bunch(self) -> Any:  # noqa: ANN401  scikit-learn has no types
        try:
            return importlib.import_module("sklearn.datasets").load_digits()
        except ImportError:
            raise DataError(
                "`digits` needs the package `scikit-learn`, which has these images with it; "
                "install `windlass[images]`"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassFolders:
    """A folder with a folder of images for each class."""

    source: str
    folders: Mapping[str, tuple[Path, ...]]
    """Image files by class, ordered by name."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(
            SourceFile(name=f"{label}/{path.name}", path=path, single_document=True)
            for label, paths in self.folders.items()
            for path in paths
        )

    def labels(self) -> Iterator[tuple[str, str]]:
        for label, paths in self.folders.items():
            for path in paths:
                yield f"{label}/{path.name}", label

    def images(self) -> Iterator[RawImage]:
        for paths in self.folders.values():
            for path in paths:
                yield path.read_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Parquet or Arrow files with a column of images and one of classes."""

    source: str
    files: tuple[SourceFile, ...]
    image_field: str
    label_field: str

    def labels(self) -> Iterator[tuple[str, str]]:
        for file in self.files:
            number = 0
            for batch in arrow_batches(file.path, (self.label_field,)):
                names = _class_names(batch.schema, self.label_field)
                for value in batch.column(self.label_field).to_pylist():
                    if value is None:
                        raise DataError(f"`{file.path}`: row {number} has no `{self.label_field}`")
                    yield f"{file.name}:{number}", _class_name(value, names, file.path, number)
                    number += 1

    def images(self) -> Iterator[RawImage]:
        for file in self.files:
            for batch in arrow_batches(file.path, (self.image_field,)):
                for value in batch.column(self.image_field).to_pylist():
                    content = value.get("bytes") if isinstance(value, dict) else value
                    if not isinstance(content, bytes):
                        raise DataError(
                            f"`{file.path}`: `{self.image_field}` holds no bytes of images, but "
                            f"`{type(content).__name__}`; name another column as "
                            "`data.image_field`, or save the data set with its images"
                        )
                    yield content


def decode_image(raw: RawImage, shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Pixels `[c h w]` of one size: scaled to fill it, and cut to its middle.

    Args:
        shape: channels, of which there are 1 or 3, height and width.

    Raises:
        DataError: it is no image, or Pillow is missing.
    """
    channels, height, width = shape
    if isinstance(raw, np.ndarray) and raw.shape == (height, width):
        return np.broadcast_to(raw, shape)
    try:
        image_module = importlib.import_module("PIL.Image")
        operations = importlib.import_module("PIL.ImageOps")
    except ImportError:
        raise DataError(
            "images need the package `pillow` to be read; install `windlass[images]`"
        ) from None
    try:
        opened = (
            image_module.fromarray(raw)
            if isinstance(raw, np.ndarray)
            else image_module.open(io.BytesIO(raw))
        )
        image = opened.convert("L" if channels == 1 else "RGB")
        scaled = operations.fit(image, (width, height), image_module.Resampling.BICUBIC)
    # Damaged files raise whatever their decoders do.
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        raise DataError(f"is no image that can be read: {_first_line(error)}") from None
    pixels = np.asarray(scaled, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.moveaxis(pixels, 2, 0)


def _class_name(value: object, names: Sequence[str], file: Path, row: int) -> str:
    """The class of a row: a name by its number, if there are names, or the value itself."""
    if not names or not isinstance(value, int):
        return str(value)
    if not 0 <= value < len(names):
        raise DataError(
            f"`{file}`: row {row} has class {value}, and the {len(names)} classes are counted from "
            "0; leave out rows whose class is not known"
        )
    return names[value]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _class_folders(root: Path) -> dict[str, tuple[Path, ...]]:
    """The image files of each folder that has some."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    found = {path.name: tuple(_image_files(path)) for path in folders}
    return {label: paths for label, paths in found.items() if paths}


def _image_files(folder: Path) -> Iterator[Path]:
    return (
        path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file() and path.name[0] != "."
    )


def _class_names(schema: Any, field: str) -> list[str]:  # noqa: ANN401  pyarrow has no types
    """Names of classes that `datasets` keeps beside a table; none if there are none."""
    try:
        content = json.loads((schema.metadata or {})[b"huggingface"])
        names = content["info"]["features"][field]["names"]
    except (KeyError, ValueError, TypeError):
        return []
    return [str(name) for name in names]
