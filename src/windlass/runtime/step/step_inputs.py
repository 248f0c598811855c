"""StepInputs: what the host hands to the device for each step: tokens, documents, keys, weights.

It is all that a step takes from the host beside the learning rate and the clip divisor.
"""

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import functional

from windlass.data import (
    Examples,
    ReadAhead,
    TokenBatch,
    TrainingBatches,
    batch_of_step,
    target_counts,
    with_one_target,
)
from windlass.errors import RunBroken
from windlass.models import HEAD_RESULTS, ContextParallelRank
from windlass.runtime.keyed_dropout import sample_keys
from windlass.runtime.optimizer_state.optimizer_state import DTYPES, master_dtype
from windlass.runtime.rank_context import RankContext


class StepInputs:
    """The inputs of one rank's micro-batches, step by step."""

    def __init__(
        self,
        context: RankContext,
        batches: TrainingBatches,
        data_rank: int,
        tokens: ContextParallelRank,
    ) -> None:
        batch = context.plan.batch
        self._batches, self._device = batches, context.device
        self._seed, self._skipped = context.seed, context.settings.skip_batches
        self._micro, self._accumulation = batch.micro, batch.accumulation
        self._samples = batch.sequences_per_replica
        self._balanced_over = context.plan.global_batch * int(context.plan.parallel.tensor)
        self._own = tokens
        self.first_sample = data_rank // tokens.degree * self._samples
        """Index of this data-parallel rank's first sample in the global batch."""
        # How many targets a rank has of divided sequences is known only once all have been read.
        rows = self._samples if tokens.degree > 1 else self._micro
        self._reader = ReadAhead(
            batches, first=self.first_sample, micro=rows, count=self._samples // rows
        )
        self._divided: Examples | None = None
        """This rank's tokens of all its samples of the step; None if it has whole sequences."""
        precision = context.plan.precision
        self._master_dtype, self._dtype = master_dtype(precision), DTYPES[precision]
        self._weighed: tuple[tuple[tuple[float, ...], ...], float] = ((), 1.0)
        """What `loss_weights` are of: shares of the targets, and the loss scale."""
        self.shares: tuple[tuple[float, ...], ...] = ()
        """Share of each micro-batch in the targets of the step's global batch, of each kind of
        target: those of tokens, and those of a sentence head."""
        self._fixed: dict[Hashable, Tensor] | None = None
        """Where the device finds each input in all steps; None if each step has its own memory."""
        self._tokens: dict[int, tuple[Tensor, Tensor]] = {}
        self._keys: dict[int, Tensor] = {}
        self._documents: dict[int, Tensor | None] = {}

    def begin_step(self, step: int, scale: float) -> None:
        """Begins a step.

        Raises:
            RunBroken: no sample of it has a target.
        """
        self.step = step
        """The step that runs, counted from 1."""
        self.batch = batch_of_step(step, self._skipped)
        """The number of the batch that it takes."""
        self._tokens, self._keys, self._documents = {}, {}, {}
        self._read_divided()
        self._weigh_losses(scale)

    def _weigh_losses(self, scale: float) -> None:
        """Counts the targets of the global batch, of which every rank knows all samples.

        A micro-batch's loss is a mean over its own targets. It is weighted with their share of all
        targets, so that the sum over all micro-batches and ranks is a mean over all targets. A
        sentence head has a loss, and a share, of its own.
        """
        counts = self._batches.target_counts(self.batch)
        end = self.first_sample + self._samples
        kinds = counts.reshape(len(counts), -1)
        own = self._own_counts(kinds[self.first_sample : end])
        own = own.reshape(self._accumulation, self._micro, -1)
        totals = kinds.sum(axis=0)
        if not totals.all():
            raise RunBroken(
                f"none of the {len(counts)} samples of step {self.step} has a target, so no loss; "
                "raise `train.batch`, or leave out examples without targets"
            )
        self.shares = tuple(map(tuple, (own.sum(axis=1) / totals).tolist()))
        if (self.shares, scale) != self._weighed:
            self._weighed = (self.shares, scale)
            wide = torch.float64 if self._device.has_float64 else torch.float32
            weights = torch.tensor(self.shares, dtype=torch.float64)
            # What else a sentence head gives, the share that is right, is no loss.
            several = functional.pad(weights, (0, HEAD_RESULTS - len(totals)))
            weights = weights[:, 0] if len(totals) == 1 else several
            self.wide_weights = self._put("weights", weights.to(wide))
            """`Float[micro_batch]`, or `[micro_batch result]` with a sentence head: the shares, in
            the precision of sums of losses."""
            scaled = (scale * weights).to(self._master_dtype)
            self.loss_weights = self._put("scaled weights", scaled)
            """Weight of each of these losses, by which backward passes begin."""
            # Each tensor-parallel rank computes a part of every gradient.
            balance = torch.tensor(scale / self._balanced_over, dtype=wide)
            self.balance = self._put("balance", balance)
            """`Float[]`: weight of one sequence's balance loss."""

    def _own_counts(self, counts: TokenBatch) -> TokenBatch:
        """How many targets of its samples this rank has, `Int[sample kind]`, of all that count."""
        if self._divided is None:
            return counts
        return target_counts(self._divided[1])[:, None]

    def fix_addresses(self) -> None:
        """From now on each input is copied to the same memory in every step.

        Recorded work finds the inputs there. `load_all` has to bring them before it runs.
        """
        self._fixed = {}
        self._weighed = ((), 1.0)

    def load_all(self, *, keys: bool, documents: bool) -> None:
        """Brings the inputs of all micro-batches of the step to the device.

        Args:
            documents: whether one takes the documents of packed rows.
        """
        for micro in range(self._accumulation):
            self._tokens[micro] = self._read(micro)
            if keys:
                self.sample_keys(micro)
            if documents:
                self.documents(micro)

    def has_loaded(self, micro: int) -> bool:
        """Whether `load_all` has brought a micro-batch that was not asked for yet."""
        return micro in self._tokens

    def tokens(self, micro: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a micro-batch; asked for once a step.

        They are token ids, or numbers in the type that layers compute with.
        """
        loaded = self._tokens.pop(micro, None)
        return loaded if loaded is not None else self._read(micro)

    def _read(self, micro: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._own_tokens(micro)
        if not all(self.shares[micro]):
            # A mean over no target is no number: one counts, with a weight of 0.
            targets = with_one_target(targets)
        numbers = torch.as_tensor(inputs)
        if numbers.is_floating_point():
            numbers = numbers.to(self._dtype)
        return self._put(("inputs", micro), numbers), self._put(("targets", micro), targets)

    def _own_tokens(self, micro: int) -> Examples:
        """This rank's tokens of a micro-batch."""
        if self._divided is None:
            return self._reader.read(self.batch, micro)
        rows = slice(micro * self._micro, (micro + 1) * self._micro)
        inputs, targets = self._divided
        return inputs[rows], targets[rows]

    def _read_divided(self) -> None:
        """Reads this rank's tokens of all micro-batches of the step, if sequences are divided."""
        if self._own.degree > 1:
            inputs, targets = map(self._own.own_tokens, self._reader.read(self.batch, 0))
            self._divided = inputs, targets

    def sample_keys(self, micro: int) -> Tensor:
        """`Int64[b]`: dropout keys of a micro-batch's samples, computed once a step."""
        if micro not in self._keys:
            keys = sample_keys(self._seed, self.step, self.micro_batch_start(micro), self._micro)
            self._keys[micro] = self._put(("keys", micro), keys)
        return self._keys[micro]

    def documents(self, micro: int) -> Tensor | None:
        """`Int[b s]`: the document of each token of a micro-batch; None if a row is one document.

        Each pipeline stage reads them itself, once a step, as all know the samples.
        """
        if micro not in self._documents:
            start = self.micro_batch_start(micro)
            ids = self._batches.document_ids(self.batch, start, self._micro)
            placed = None if ids is None else self._put(("documents", micro), ids)
            self._documents[micro] = placed
        return self._documents[micro]

    def micro_batch_start(self, micro: int) -> int:
        """Index of a micro-batch's first sample in the global batch."""
        return self.first_sample + micro * self._micro

    def _put(self, name: Hashable, values: Tensor | TokenBatch) -> Tensor:
        """An input on the device; the host does not wait for it."""
        tensor = torch.as_tensor(values)
        if self._fixed is None:
            return self._device.to_device(tensor)
        if name not in self._fixed:
            self._fixed[name] = torch.empty_like(tensor, device=self._device.torch_device)
        return self._device.to_device(tensor, into=self._fixed[name])

    def close(self) -> None:
        """Ends the thread that reads micro-batches."""
        self._reader.close()
