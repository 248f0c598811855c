"""The optimizer of a run, for one layer at a time."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from windlass.runtime.optimizer_state.optimizer_state import averaging_of
from windlass.runtime.optimizers.gradient_norms import GradientNorms, flattened, in_groups
from windlass.runtime.optimizers.learning_rate import NewestShares
from windlass.runtime.optimizers.step_numbers import StepNumbers
from windlass.runtime.optimizers.updates import UPDATES, Chunk, Hyperparameters, Scratch, adamw
from windlass.runtime.optimizers.weight_steps import (
    WeightStep,
    apply_orthogonal,
    momentum_update,
    orthogonal_parts,
    step_type,
    weight_step,
    whole_weight_passes,
)
from windlass.runtime.parameters import MasterParameter
from windlass.schema import MomentFormat, TrainSettings, optimizer_law
from windlass.torch_ext import (
    PART_ELEMENTS,
    Device,
    MomentCodec,
    StochasticRounding,
    StoredMoment,
    dither_key,
)


class WeightRanks(Protocol):
    """The ranks that hold parts of a layer's weights, this one among them.

    All of them call each method alike, for the same layers in the same order.
    """

    def sum(
        self, own: Mapping[str, Tensor], length: Callable[[tuple[int, ...]], int]
    ) -> Mapping[str, Tensor]:
        """Sums over all parts of each weight.

        Args:
            own: what this rank's part of each weight contributes, `Float[n]` by full name.
        """

    @property
    def matrices(self) -> Sequence[str]:
        """Full names of all matrices of the layer that are updated whole, in order."""

    def gather(self, name: str, own: Tensor | None) -> Tensor:
        """A whole matrix, `[rows columns]`.

        Args:
            own: this rank's part; None for zeros.
        """

    def part(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of a whole matrix, in the shape of its weight here."""


class SingleRank:
    """A rank that holds whole weights."""

    def __init__(self, weights: Sequence[MasterParameter]) -> None:
        self.matrices = [weight.name for weight in weights if weight.matrix]

    def sum(
        self, own: Mapping[str, Tensor], length: Callable[[tuple[int, ...]], int]
    ) -> Mapping[str, Tensor]:
        """The contributions themselves."""
        del length
        return own

    def gather(self, name: str, own: Tensor | None) -> Tensor:
        """The matrix itself."""
        if own is None:
            raise ValueError(f"`{name}` has no update, and no other rank has parts of it")
        return own

    def part(self, name: str, full: Tensor) -> Tensor:
        """The matrix itself."""
        del name
        return full


class Optimizer(GradientNorms):
    """The optimizer that `settings` name; it holds no state except small buffers.

    Weights of one dimension never decay.

    Args:
        moments: storage format of the moments; all but float32 are decoded part by part.
        joined: rows of each matrix in a weight that is several, by its full name; None if none is.
    """

    def __init__(
        self,
        settings: TrainSettings,
        device: Device,
        moments: MomentFormat = "float32",
        joined: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(device)
        self._settings, self._joined = settings, joined or {}
        self.numbers = StepNumbers(settings, device)
        """Learning rates and the clip divisor of each step."""
        self._law = optimizer_law(settings.optimizer)
        self._update = UPDATES.get(settings.optimizer, adamw)
        averaging = averaging_of(settings)
        self._average = averaging if averaging is not None and averaging.is_kept else None
        self._shares = NewestShares(settings) if self._law.averages else None
        self.codec = None if moments == "float32" else MomentCodec(device.torch_device)
        """Encodes and decodes moments; None where they are stored in float32."""
        self._rounding: StochasticRounding | None = None
        """Rounds weights that are their own masters in bfloat16; made when there are any."""
        self._wide_masters: Tensor | None = None
        """`Float32[piece_elements]`: such weights while they are updated."""

    def update(
        self,
        weights: Iterable[MasterParameter],
        step: int,
        clip_divisor: Tensor | None,
        ranks: WeightRanks | None = None,
    ) -> None:
        """Takes one step for parameters that have a gradient, and drops the gradients.

        Args:
            clip_divisor: divisor of all gradients; None for 1.
            ranks: the ranks that hold parts of the same weights; None if these are whole.
        """
        hyper = self._hyperparameters(step, clip_divisor)
        present = [weight for weight in weights if weight.gradient is not None]
        ranks = ranks or SingleRank(present)
        if self._law.scope == "tensor":
            self._update_by_weight(present, hyper, ranks)
        else:
            if self._law.scope == "matrix":
                matrices = {weight.name: weight for weight in present if weight.matrix}
                self._update_matrices(matrices, hyper, ranks)
            self._update_elements(
                [weight for weight in present if weight.gradient is not None], hyper
            )
        if self._average is not None:
            pairs = [(w.average, w.master.detach()) for w in present if w.average is not None]
            self._average.add([to for to, _ in pairs], [of for _, of in pairs])

    def part_passes(
        self, *, step: int, clip_divisor: Tensor | None
    ) -> tuple[Callable[[Chunk], None], ...]:
        """What takes one step for whole weights part by part, in place: one or more passes.

        Each is called with every part of a layer's weights before the next one; `reads_gradient`
        says which of them read gradients.

        Args:
            step: step number, counted from 1; determines the learning rate.
            clip_divisor: divisor of all gradients; None for 1.
        """
        hyper = self._hyperparameters(step, clip_divisor)

        def update(chunk: Chunk) -> None:
            own = hyper(chunk.name, chunk.decays)
            if self.codec is not None:
                self._step_encoded(self.codec, chunk, own)
            else:
                self._step([chunk], own)

        if self._law.scope == "tensor":
            *first, last = self._weight_passes(hyper)
        else:
            first, last = [], update

        def update_and_average(chunk: Chunk) -> None:
            last(chunk)
            if self._average is not None and chunk.average is not None:
                self._average.add([chunk.average], [chunk.master])

        return (*first, update_and_average)

    @property
    def reads_gradient(self) -> tuple[bool, ...]:
        """Whether each of the passes reads gradients."""
        if self._law.scope == "tensor":
            return step_type(self._law).reads_gradient
        return (True,)

    def _hyperparameters(
        self, step: int, clip_divisor: Tensor | None
    ) -> Callable[[str, bool], Hyperparameters]:
        """Hyperparameters of a step by a weight's name and whether it decays."""
        share = 1.0 if self._shares is None else self._shares.of_step(step)

        def of_weight(name: str, decays: bool) -> Hyperparameters:
            own_rate, decay = self.numbers.rate_and_decay(name, step, decays=decays)
            return Hyperparameters(
                self._settings, own_rate, decay, clip_divisor, step=step, newest_share=share
            )

        return of_weight

    def _update_elements(
        self, weights: Sequence[MasterParameter], hyper: Callable[[str, bool], Hyperparameters]
    ) -> None:
        """Takes one step of an update whose elements do not read each other."""
        groups: dict[tuple[float | Tensor, float], list[MasterParameter]] = defaultdict(list)
        for weight in sorted(weights, key=lambda weight: not weight.decays):
            own = hyper(weight.name, weight.decays)
            groups[own.rate, own.decay].append(weight)
        for together in groups.values():
            own = hyper(together[0].name, together[0].decays)
            chunks = (chunk for weight in together for chunk in self._chunks(weight))
            if self.codec is not None:
                for chunk in chunks:
                    self._step_encoded(self.codec, chunk, own)
                continue
            for group in in_groups(chunks, self._cached_elements, self._device.piece_elements):
                self._step(group, own)

    def _weight_passes(
        self, hyper: Callable[[str, bool], Hyperparameters]
    ) -> Iterator[Callable[[Chunk], None]]:
        """The passes of an update that reads sums over whole weights."""
        chunks: dict[str, Chunk] = {}
        scratch = Scratch()

        def new_step(name: str) -> WeightStep:
            chunk = chunks[name]
            own = hyper(name, chunk.decays)
            return weight_step(self._law, own, chunk.factors, scratch, decays=chunk.decays)

        def visit(one_pass: Callable[[Chunk], None], chunk: Chunk) -> None:
            chunks[chunk.name] = chunk
            one_pass(chunk)

        return (partial(visit, each) for each in whole_weight_passes(self._law, new_step))

    def _update_by_weight(
        self,
        weights: Sequence[MasterParameter],
        hyper: Callable[[str, bool], Hyperparameters],
        ranks: WeightRanks,
    ) -> None:
        """Takes one step of an update that reads sums over whole weights."""
        scratch = Scratch()
        steps = {
            w.name: weight_step(
                self._law, hyper(w.name, w.decays), w.factors, scratch, decays=w.decays
            )
            for w in weights
        }
        chunks = [(steps[weight.name], tuple(self._chunks(weight))) for weight in weights]
        last = len(self.reads_gradient) - 1
        for index, reads in enumerate(self.reads_gradient):
            for step, parts in chunks:
                for chunk in parts:
                    gradient = self.to_float([chunk.gradient])[0] if reads else chunk.gradient
                    step.visit(index, chunk, gradient)
                    if index == last and chunk.working is not None:
                        chunk.working.copy_(chunk.master)
            if index < last:
                sums = {name: step.own_sums() for name, step in steps.items()}
                totals = ranks.sum(sums, partial(self._law.summed_elements, index))
                for name, step in steps.items():
                    step.take(index, totals[name])

    def _update_matrices(
        self,
        weights: Mapping[str, MasterParameter],
        hyper: Callable[[str, bool], Hyperparameters],
        ranks: WeightRanks,
    ) -> None:
        """Takes one step of an update of whole matrices, one after the other."""
        for name in ranks.matrices:
            own_hyper = hyper(name, True)
            weight = weights.get(name)
            own: Tensor | None = None
            if weight is not None and weight.gradient is not None:
                gradient, weight.gradient = weight.gradient.to(weight.master.dtype), None
                own = momentum_update(weight.moments[0].values, gradient, own_hyper)
            full = ranks.gather(name, own)
            rows = self._joined.get(name, ())
            part = ranks.part(name, orthogonal_parts(full, rows))
            if weight is not None and own is not None:
                apply_orthogonal(
                    weight.master.detach(),
                    part,
                    max(*(rows or full.shape), full.size(1)),
                    own_hyper,
                )
                weight.refresh_working_copy()
                weight.steps.add_(1)

    def _step(self, chunks: Sequence[Chunk], hyper: Hyperparameters) -> None:
        """Updates chunks with unquantized moments in one call, and increments their updates."""
        if chunks[0].master.dtype == torch.bfloat16:
            self._step_rounded(chunks, hyper)
            return
        gradients = self.to_float([chunk.gradient for chunk in chunks])
        self._update(chunks, gradients, hyper)
        refreshed = [chunk for chunk in chunks if chunk.working is not None]
        if refreshed:
            working = [chunk.working for chunk in refreshed if chunk.working is not None]
            torch._foreach_copy_(working, [chunk.master for chunk in refreshed])

    def _step_rounded(self, chunks: Sequence[Chunk], hyper: Hyperparameters) -> None:
        """Updates chunks in float32, and rounds them stochastically to bfloat16."""
        device = self._device.torch_device
        if self._rounding is None or self._wide_masters is None:
            self._rounding = StochasticRounding(device, self._settings.seed)
            self._wide_masters = torch.empty(self._device.piece_elements, device=device)
        counts = [chunk.master.numel() for chunk in chunks]
        wide = self._wide_masters[: sum(counts)].split(counts)
        torch._foreach_copy_(wide, [flattened(chunk.master) for chunk in chunks])
        flat = [
            chunk._replace(master=values, gradient=flattened(chunk.gradient))
            for chunk, values in zip(chunks, wide, strict=True)
        ]
        self._step(flat, hyper)
        for chunk, values in zip(chunks, wide, strict=True):
            self._rounding.round(
                values, flattened(chunk.master), step=hyper.step, weight=chunk.name,
                first=chunk.offset,
            )  # fmt: skip

    def _step_encoded(self, codec: MomentCodec, chunk: Chunk, hyper: Hyperparameters) -> None:
        """Updates a chunk, and decodes and encodes its moments part by part."""
        master, (gradient,) = flattened(chunk.master), self.to_float([flattened(chunk.gradient)])
        for start in range(0, master.numel(), PART_ELEMENTS):
            n = min(PART_ELEMENTS, master.numel() - start)
            stored = tuple(moment.narrow(start, n) for moment in chunk.moments)
            values = codec.decode(stored)
            decoded = chunk._replace(
                master=master[start : start + n],
                gradient=gradient[start : start + n],
                moments=tuple(map(StoredMoment, values)),
                working=None,
                updates=chunk.updates.clone(),
                offset=chunk.offset + start,
            )
            self._step([decoded], hyper)
            part_index = (chunk.offset + start) // PART_ELEMENTS
            key = dither_key(self._settings.seed, hyper.step, chunk.name, part_index)
            codec.encode(values, stored, key)
        if chunk.working is not None:
            chunk.working.copy_(chunk.master)
        chunk.updates.add_(1)

    def _cached_elements(self, chunk: Chunk) -> int:
        """Elements of a chunk that pass through the cache; none if each is touched only once."""
        is_own_master = chunk.working is None and chunk.master.dtype != torch.bfloat16
        return 0 if is_own_master and self._law.fused else chunk.master.numel()

    def _chunks(self, weight: MasterParameter) -> Iterator[Chunk]:
        """A parameter in pieces of the device, or in one where each element is touched once.

        It gives up its gradient.
        """
        gradient, weight.gradient = weight.gradient, None
        if gradient is None:
            return
        converts = weight.working is not weight.master
        rounds = weight.master.dtype == torch.bfloat16
        if not converts and not rounds and self._law.fused:
            yield Chunk(
                weight.name, weight.offset, weight.master.detach(), weight.moments, gradient, None,
                weight.steps,
            )  # fmt: skip
            return
        masters, gradients, working = (
            self.pieces_of(flattened(tensor))
            for tensor in (weight.master, gradient, weight.working)
        )
        del gradient
        start = 0
        for index, master in enumerate(masters):
            # The update of a chunk increments its count: that of the last is the weight's own.
            is_last = index == len(masters) - 1
            yield Chunk(
                name=weight.name,
                offset=weight.offset + start,
                master=master,
                moments=tuple(moment.narrow(start, len(master)) for moment in weight.moments),
                gradient=gradients[index],
                working=working[index] if converts else None,
                updates=weight.steps if is_last else weight.steps.clone(),
            )
            start += len(master)
