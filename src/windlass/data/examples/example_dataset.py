"""ExampleDataset: examples in memory or mapped into it, and the file that keeps them."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from windlass.data.batches import TokenBatch
from windlass.data.keyed_choices import epoch_places, sample_indices
from windlass.data.pixels import PixelScale
from windlass.data.targets import ExampleArray, target_counts
from windlass.data.tokenizer import Tokenizer

_CLASSES = "classes"
"""Key of the names of classes in a file's metadata."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExampleDataset:
    """Examples of one shape; the last ones are held out."""

    inputs: ExampleArray
    """Token ids `Int[example s]`, numbers `Float[example ...]`, or pixels `UInt8[example c h w]`
    with a `pixels`."""
    targets: ExampleArray
    """What each token of the inputs should predict, `Int[example s]`; the class of each example,
    `Int[example]`, or its numbers, `Float[example n]`."""
    held_out: int
    """Number of examples at the end that are never trained on."""
    documents: TokenBatch | None = None
    """Which document of its example each token belongs to, `Int[example s]`: none sees another,
    and positions begin at 0 in each. None means that an example is one document."""
    pixels: PixelScale | None = None
    """How pixels become numbers; None takes the inputs as they are."""
    classes: tuple[str, ...] | None = None
    """Names of the classes; None means that they have none, or that a source keeps them."""
    tokenizer: Tokenizer | None = None
    """What made the token ids; None if that is not known."""
    content: str | None = None
    """A hash of inputs and targets that is known already; None computes one when it is needed."""

    @property
    def has_tokens(self) -> bool:
        """Whether the inputs are rows of token ids."""
        return self.inputs.dtype == np.int64

    @property
    def has_classes(self) -> bool:
        """Whether each example has one class as its target."""
        return self.targets.ndim == 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.inputs.shape[1:])

    @property
    def sequence(self) -> int | None:
        """Tokens of an example; None without tokens."""
        return int(self.inputs.shape[1]) if self.has_tokens else None

    @property
    def vocabulary(self) -> int:
        """Entries that a model's vocabulary needs, classes, or numbers that are predicted."""
        if self.targets.dtype.kind == "f":
            return int(self.targets.shape[1])
        highest = int(self.targets.max())
        return 1 + (max(highest, int(self.inputs.max())) if self.has_tokens else highest)

    @property
    def fingerprint(self) -> str:
        """Hash of all examples."""
        digest = hashlib.sha256(str((self.inputs.shape, self.held_out)).encode())
        if self.content is not None:
            digest.update(self.content.encode())
        else:
            for part in (self.inputs, self.targets, *self._packed.values()):
                digest.update(part.tobytes())
        if self.pixels is not None:
            digest.update(str(self.pixels).encode())
        return digest.hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Writes the examples to a safetensors file."""
        held_out = np.array([self.held_out], dtype=np.int64)
        arrays = {
            "inputs": np.ascontiguousarray(self.inputs), "targets": self.targets,
            "held_out": held_out,
        }  # fmt: skip
        if self.pixels is not None:
            arrays |= {
                "mean": np.array(self.pixels.mean), "std": np.array(self.pixels.std),
                "moves": np.array([self.pixels.flips, self.pixels.border], dtype=np.int64),
            }  # fmt: skip
        names = None if self.classes is None else {_CLASSES: json.dumps(self.classes)}
        save_file(arrays | self._packed, path, metadata=names)

    def excerpt(self, *, train: int, held_out: int) -> "ExampleDataset":
        """The first examples to train on, and the first ones of those that are held out.

        Args:
            train: most examples to train on.
            held_out: most that are held out.
        """
        first = len(self.inputs) - self.held_out
        held_out = min(held_out, self.held_out)
        rows = np.r_[0 : min(train, first), first : first + held_out]
        documents = None if self.documents is None else self.documents[rows]
        return ExampleDataset(
            inputs=self.inputs[rows], targets=self.targets[rows], held_out=held_out,
            documents=documents, pixels=self.pixels, classes=self.classes,
        )  # fmt: skip

    @property
    def _packed(self) -> dict[str, TokenBatch]:
        return {} if self.documents is None else {"documents": self.documents}


def load_examples(path: Path) -> ExampleDataset | None:
    """The examples in a file that `ExampleDataset.save` wrote; None if there is none."""
    if not path.is_file():
        return None
    tensors, classes = load_file(path), None
    with safe_open(path, framework="numpy") as file:
        if names := (file.metadata() or {}).get(_CLASSES):
            classes = tuple(json.loads(names))
    pixels = None
    if "moves" in tensors:
        flips, border = tensors["moves"].tolist()
        mean, std = (tuple(tensors[name].tolist()) for name in ("mean", "std"))
        pixels = PixelScale(mean=mean, std=std, flips=bool(flips), border=border)
    return ExampleDataset(
        inputs=tensors["inputs"],
        targets=tensors["targets"],
        held_out=int(tensors["held_out"][0]),
        documents=tensors.get("documents"),
        pixels=pixels,
        classes=classes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class ExampleBatches:
    """The batches of examples, each a function of the seed and the step alone, as `Batches`.

    Each epoch takes all examples in a keyed order. They have no text, and so no bits per byte.
    """

    examples: ExampleDataset
    _: KW_ONLY
    batch: int
    """Global batch, in examples."""
    seed: int

    @property
    def _training(self) -> int:
        return len(self.examples.inputs) - self.examples.held_out

    def samples(
        self, step: int, first: int = 0, count: int | None = None
    ) -> tuple[ExampleArray, ExampleArray]:
        """Inputs and targets of consecutive samples of a step, `Int[count s]` or as the examples'.

        Args:
            first: index of the first sample in the global batch, from 0.
            count: number of samples; None takes the rest of the batch.
        """
        rows = self._rows(step, first, self.batch - first if count is None else count)
        inputs, pixels = self.examples.inputs[rows], self.examples.pixels
        if pixels is not None:
            keys = [(self.seed, step, first + index) for index in range(len(rows))]
            inputs = pixels.training_numbers(inputs, keys)
        return inputs, self.examples.targets[rows]

    def document_ids(self, step: int, first: int, count: int) -> TokenBatch | None:
        """Documents `Int[count s]` of consecutive samples of a step; None if each is one."""
        documents = self.examples.documents
        return None if documents is None else documents[self._rows(step, first, count)]

    def held_out_documents(self, count: int, rows: int = 1) -> Iterator[TokenBatch | None]:
        """The documents of `held_out_batches(count, rows)`; None if each example is one."""
        documents = self.examples.documents
        for chosen in self._held_out_slices(count, rows):
            yield None if documents is None else documents[chosen]

    def target_counts(self, step: int) -> TokenBatch:
        """Number of targets that count in the loss, `Int[sample]`, of all samples of a step."""
        return target_counts(self.examples.targets[self._rows(step, 0, self.batch)])

    def document_names(self, step: int, sample: int) -> tuple[str, ...]:
        """The example that a sample of a step is, as a message names it."""
        return (f"example {self._rows(step, sample, 1)[0]}",)

    def held_out_batches(
        self, count: int, rows: int = 1
    ) -> Iterator[tuple[ExampleArray, ExampleArray]]:
        """Inputs and targets of held-out examples, the same in every call and every run.

        Args:
            count: total number of examples, limited to those that exist.
            rows: examples per batch; the last batch may have fewer.
        """
        for chosen in self._held_out_slices(count, rows):
            inputs, pixels = self.examples.inputs[chosen], self.examples.pixels
            yield (
                inputs if pixels is None else pixels.numbers(inputs),
                self.examples.targets[chosen],
            )

    def _held_out_slices(self, count: int, rows: int) -> Iterator[slice]:
        begin = self._training
        end = begin + min(count, self.examples.held_out)
        for start in range(begin, end, rows):
            yield slice(start, min(start + rows, end))

    def bits_per_byte(self, loss: float, count: int) -> None:
        """None: examples stand for no bytes of text."""
        del loss, count

    def _rows(self, step: int, first: int, count: int) -> TokenBatch:
        """Indices of consecutive samples of a step, `Int[sample]`."""
        indices = sample_indices(step, first, count, self.batch)
        return epoch_places(indices, self._training, self.seed)
