"""Names such as `hf:DIR`: the folder or the `config.json` that they mean."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.atomic_files import read_regular_file
from windlass.document import read_json_object
from windlass.errors import ModelError, shorten
from windlass.schema import HUGGING_FACE_PREFIX as PREFIX

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
ADAPTER_CONFIG = "adapter_config.json"
"""What PEFT writes beside adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What a name such as `hf:DIR` means."""

    name: str
    """The name as it was given."""
    config: Path
    """Its `config.json`."""
    weights: Path | None
    """The folder with its weights; None if the name is that of a `config.json`, which is a shape
    without weights."""

    def read_config(self) -> dict[str, Any]:
        """The content of `config.json`; `Any` because it is not validated yet.

        Raises:
            ModelError: there is no such file, or it is no JSON object.
        """
        return read_json_object(self.config, ModelError)

    def read_small_file(self, name: str) -> bytes | None:
        """The content of a small file beside the weights; None if there is none.

        In the cache of the hub the files of a snapshot are links to `blobs` beside `snapshots`.
        Through any other link an export would carry away what does not belong to the model.

        Raises:
            ModelError: it is a link that leads elsewhere.
        """
        if self.weights is None or not (path := self.weights / name).is_file():
            return None
        folder = self.weights.resolve()
        home = folder.parent.parent if folder.parent.name == "snapshots" else folder
        if not path.resolve().is_relative_to(home):
            raise ModelError(
                f"`{path}` is a link to `{shorten(str(path.resolve()))}`, outside the model's "
                "folder; put the file itself there"
            )
        return read_regular_file(path)


def is_huggingface(name: str) -> bool:
    """Whether a model's name is one of a Hugging Face folder or `config.json`."""
    return name.startswith(PREFIX)


def is_pretrained(name: str) -> bool:
    """Whether a model's name is one of a Hugging Face folder, whose weights are trained already."""
    return is_huggingface(name) and not name.endswith(".json")


def is_peft_folder(path: Path) -> bool:
    """Whether a folder holds adapters of PEFT."""
    return (path / ADAPTER_CONFIG).is_file()


def find_model_folder(name: str) -> ModelFolder:
    """The folder or file that a name means.

    Args:
        name: `hf:DIR`, or `hf:DIR/config.json` for the shape alone.

    Raises:
        ModelError: there is no such folder, or no `config.json` in it.
    """
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if path.is_file() and path.suffix == ".json":
        return ModelFolder(name=name, config=path, weights=None)
    if not path.is_dir():
        raise ModelError(
            f"no folder `{shorten(str(path))}`; `{PREFIX}DIR` reads a Hugging Face model from a "
            "folder of this machine, so download it first (`hf download NAME --local-dir DIR`)"
        )
    if not (path / CONFIG_FILE).is_file():
        inside = sorted(config.parent.name for config in path.glob(f"*/{CONFIG_FILE}"))
        hint = f"; did you mean `{PREFIX}{path / inside[0]}`?" if inside else ""
        raise ModelError(
            f"`{path}` has no `{CONFIG_FILE}`, which every Hugging Face model has{hint}"
        )
    return ModelFolder(name=name, config=path / CONFIG_FILE, weights=path)


def tokenizer_file(name: str) -> Path | None:
    """The `tokenizer.json` beside a model's `config.json`; None if there is none.

    Raises:
        ModelError: there is no such model.
    """
    path = find_model_folder(name).config.with_name(TOKENIZER_FILE)
    return path if path.is_file() else None
