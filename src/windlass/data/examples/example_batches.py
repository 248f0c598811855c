"""ExampleBatches: which examples each step takes."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from windlass.data.batches import TokenBatch
from windlass.data.examples.example_dataset import ExampleDataset
from windlass.data.keyed_choices import epoch_places, sample_indices
from windlass.data.targets import ExampleArray, target_counts


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
