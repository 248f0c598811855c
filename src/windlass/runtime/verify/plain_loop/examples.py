"""Images and other examples by the written specification, docs/reference/data-order.md.

It shares no code with `windlass.data`: it reads the file itself, and works image by image.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from windlass.runtime.verify.plain_loop.data_order import number, permuted

_BRIGHTEST = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainExamples:
    """The samples of each step, and the held-out examples."""

    inputs: Tensor
    """Pixels `[example c h w]`, or numbers `[example ...]`."""
    targets: Tensor
    held_out: int
    """Examples at the end that are never trained on."""
    mean: Tensor | None
    """Mean of each channel, `Float[c]`; None takes the inputs as they are."""
    std: Tensor | None
    flips: bool
    border: int
    batch: int
    """Global batch in examples."""
    seed: int
    apart: Tensor | None
    """Which document of its example each token belongs to, `Int[example s]`; None has none."""
    dtype: torch.dtype
    """Type of the numbers that a model takes."""
    places = 0
    """Targets behind those of an example's tokens."""

    def samples(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, counted from 1."""
        rows = self._rows(step)
        images = [
            self._augmented(self._numbers(row), (self.seed, step, index))
            for index, row in enumerate(rows)
        ]
        return torch.stack(images), self.targets[rows]

    def documents(self, step: int) -> Tensor | None:
        """Which document of its example each token of a step belongs to; None if each is one."""
        return None if self.apart is None else self.apart[self._rows(step)]

    def held_out_documents(self, count: int) -> Tensor | None:
        """As `documents` of `held_out_samples`."""
        first = len(self.inputs) - self.held_out
        if self.apart is None:
            return None
        return self.apart[first : first + min(count, self.held_out)]

    def _rows(self, step: int) -> list[int]:
        training, rows = len(self.inputs) - self.held_out, []
        for index in range(self.batch):
            epoch, position = divmod((step - 1) * self.batch + index, training)
            rows.append(permuted(position, training, self.seed, epoch))
        return rows

    def held_out_samples(self, count: int) -> tuple[Tensor, Tensor, int]:
        """Inputs and targets of at most `count` held-out examples, which stand for no bytes."""
        first = len(self.inputs) - self.held_out
        rows = list(range(first, first + min(count, self.held_out)))
        return torch.stack([self._numbers(row) for row in rows]), self.targets[rows], 0

    def _numbers(self, row: int) -> Tensor:
        if self.inputs.dtype == torch.int64:
            return self.inputs[row]
        x = self.inputs[row].float()
        if self.mean is not None and self.std is not None:
            x = torch.stack(
                [
                    (channel / _BRIGHTEST - mean) / std
                    for channel, mean, std in zip(x, self.mean, self.std, strict=True)
                ]
            )
        return x.to(self.dtype)

    def _augmented(self, image: Tensor, key: tuple[int, ...]) -> Tensor:
        if self.flips and number(2, *key, 0):
            image = image.flip(-1)
        if not self.border:
            return image
        down, right = (number(2 * self.border + 1, *key, side) - self.border for side in (1, 2))
        moved = torch.zeros_like(image)
        _, height, width = image.shape
        for y in range(height):
            for x in range(width):
                if 0 <= y + down < height and 0 <= x + right < width:
                    moved[:, y, x] = image[:, y + down, x + right]
        return moved


def read_plain_examples(file: Path, *, batch: int, seed: int, dtype: torch.dtype) -> PlainExamples:
    """The examples in a safetensors file."""
    tensors = load_file(file)
    flips, border = tensors["moves"].tolist() if "moves" in tensors else (0, 0)
    mean, std = (tensors[name].float() if name in tensors else None for name in ("mean", "std"))
    return PlainExamples(
        inputs=tensors["inputs"], targets=tensors["targets"],
        held_out=int(tensors["held_out"]), mean=mean, std=std, flips=bool(flips), border=border,
        batch=batch, seed=seed, apart=tensors.get("documents"), dtype=dtype,
    )  # fmt: skip
