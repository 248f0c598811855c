"""The safetensors files of a folder: which tensor stands in which, by their headers alone."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from windlass.document import read_json_object
from windlass.errors import InputErrors, ModelError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
FLOAT_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
"""Types of weights by their names in safetensors."""
TYPES = FLOAT_TYPES | {"I64": torch.int64}
"""These, and that of counters among buffers."""
_LENGTH_BYTES = 8
"""At the start of a file, the length of its header."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor stands, and what it is."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """In the words of safetensors, such as `BF16`."""
    offset: int
    """First byte of its values in the file."""
    nbytes: int


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by name; nothing but headers is read.

    Raises:
        ModelError: there are none in safetensors, or a file cannot be read.
        InputErrors: the index and the files disagree, or a tensor stands in two of them.
    """
    # In the order in which transformers looks for them.
    if (folder / WEIGHTS_FILE).is_file():
        return list_file(folder / WEIGHTS_FILE)
    if (folder / INDEX_FILE).is_file():
        return _list_shards(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"`{folder}` has its weights as pickles (`{pickles[0]}`), which can run any code when "
            "they are read, and are not; save them as safetensors where you trust them: "
            "`AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)`"
        )
    raise ModelError(
        f"`{folder}` has no weights (`{WEIGHTS_FILE}` or `{INDEX_FILE}`); download them, or name "
        f"`hf:{folder / 'config.json'}` to draw weights for its shape from the seed"
    )


def list_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:  # checks the header
            names = tuple(file.keys())
        header, begin = _read_header(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"`{path}` is no safetensors file, or is damaged ({error}); download it again"
        ) from None
    return {name: _stored_tensor(path, header[name], begin) for name in names}


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, and where their values begin.

    Source: https://github.com/huggingface/safetensors, section "Format".
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return json.loads(file.read(length)), _LENGTH_BYTES + length


def _stored_tensor(path: Path, entry: Mapping[str, Any], begin: int) -> StoredTensor:
    first, end = entry["data_offsets"]
    return StoredTensor(path, tuple(entry["shape"]), entry["dtype"], begin + first, end - first)


def read_tensor(name: str, stored: StoredTensor) -> Tensor:
    """The values of one tensor.

    Raises:
        ModelError: the file cannot be read any more.
    """
    try:
        with safe_open(stored.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise ModelError(f"`{name}` of `{stored.file}` cannot be read: {error}") from None


def _list_shards(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of several files, of which an index says which has what."""
    index = folder / INDEX_FILE
    places = read_json_object(index, ModelError).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(at, str) for at in places.values()):
        raise ModelError(f"`{index}` has no `weight_map` of tensors and their files")
    names = sorted(set(places.values()))
    errors = [
        f"`{index}` names `{name}`, which is not in the folder; download it again"
        for name in names
        if name != Path(name).name or not (folder / name).is_file()
    ]
    if errors:
        raise InputErrors(errors)
    by_file = {name: list_file(folder / name) for name in names}
    errors = [*_misplaced(index, places, by_file)]
    if errors:
        raise InputErrors(errors)
    return {name: by_file[file][name] for name, file in places.items()}


def _misplaced(
    index: Path, places: Mapping[str, str], by_file: Mapping[str, Mapping[str, StoredTensor]]
) -> list[str]:
    """Where an index and its files disagree."""
    counts = Counter(name for tensors in by_file.values() for name in tensors)
    errors = [f"`{name}` stands in {n} files of `{index}`" for name, n in counts.items() if n > 1]
    errors += [
        f"`{index}` says that `{file}` has `{name}`, and it has not"
        for name, file in places.items()
        if name not in by_file[file]
    ]
    errors += [f"`{name}` is not in `{index}`" for name in counts if name not in places]
    return errors
