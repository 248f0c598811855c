"""The offloaded state of one layer: read, updated and written back in parts.

Device memory holds no more of it than the staging buffers, whatever the size of the layer. While
one part is updated, the next is read and the previous one is written.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from windlass.program import gradients_reuse_weight_space
from windlass.runtime.checkpoint.convert_moments import load_factors
from windlass.runtime.checkpoint.layer_tensors import read_tensors
from windlass.runtime.checkpoint.safetensors_io import PendingChecksum
from windlass.runtime.offload.backing_store import BackingStore, BackingStores, StoreHandle
from windlass.runtime.offload.direct_io import round_up_to_page
from windlass.runtime.offload.staging_buffers import (
    GRADIENT_BUFFER,
    LayerUpdate,
    Part,
    StagingBuffers,
    StateParts,
    UpdatePass,
    part_elements,
)
from windlass.runtime.offload.state_layout import (
    StateLayout,
    TensorRegion,
    state_layout,
    tensor_region,
    write_tail,
)
from windlass.runtime.offload.transfer_queue import TransferQueue, TransferStats
from windlass.runtime.optimizer_state.factored_moment import FactoredMoment
from windlass.runtime.optimizer_state.optimizer_state import (
    DTYPES,
    Averaging,
    grad_accum_dtype,
    state_format,
    stored_dtype,
)
from windlass.runtime.optimizers.updates import Chunk
from windlass.runtime.parameters import SHARD_SEPARATOR, MasterParameter
from windlass.schema import DEVICE_TIER, Plan


class OffloadedLayerState:
    """The offloaded state of one layer.

        layer-0003.safetensors   masters, moments and update counts; also a valid checkpoint file
        layer-0003.working       what the layer computes with, if that is not the masters
        layer-0003.gradients     the accumulated gradients until their update, if the layer offloads
                                 gradients and they may not reuse the space of the working weights

    Args:
        decays: whether weight decay applies to each weight; None for weights of two or more
            dimensions.
    """

    def __init__(
        self,
        stores: BackingStores,
        index: int,
        plan: Plan,
        weights: Mapping[str, tuple[int, ...]],
        buffers: Mapping[str, Tensor],
        *,
        grad_layers: Collection[int],
        decays: Sequence[bool] | None = None,
    ) -> None:
        offload, working_dtype = plan.offload, DTYPES[plan.precision]
        self._buffers = buffers
        state, like = state_format(plan), torch.empty(0, dtype=stored_dtype(plan))
        self._factors = [state.new_factors(shape, like) for shape in weights.values()]
        """Second moment of each weight by rows and columns, in device memory."""
        self._names = tuple(weights)
        self._layout: StateLayout = state_layout(
            weights, tuple(self._tail()), state, stored_dtype(plan)
        )
        self._first_moment_is_weight = state.law.averages
        self._parts = StateParts(self._layout, part_elements(plan))
        self._decays = decays or tuple(len(shape) >= 2 for shape in weights.values())
        self._updates = [0] * len(weights)
        self.working: TensorRegion = tensor_region(weights, working_dtype)
        """The region of what the layer computes with."""
        self._gradient_region = tensor_region(weights, grad_accum_dtype(plan))
        name = f"layer-{index:04d}"
        state_bytes = self._layout.nbytes
        self._state = stores.create(offload.optimizer, f"{name}.safetensors", state_bytes)
        self._working: BackingStore | None = None
        """None if layers compute with the masters."""
        self._gradients: BackingStore | None = None
        """None if gradients are not offloaded."""
        offloads_grads = index in grad_layers
        shares_space = gradients_reuse_weight_space(plan) and offloads_grads
        if working_dtype != self._layout.masters.dtype:
            nbytes = max(self.working.nbytes, self._gradient_region.nbytes if shares_space else 0)
            tier = offload.optimizer if offload.parameters == DEVICE_TIER else offload.parameters
            self._working = stores.create(tier, f"{name}.working", nbytes)
        if shares_space:
            self._gradients = self._working
        elif offloads_grads:
            nbytes = self._gradient_region.nbytes
            self._gradients = stores.create(offload.gradients, f"{name}.gradients", nbytes)

    def create(
        self,
        masters: Sequence[Tensor],
        staging: StagingBuffers,
        loaded: Sequence[MasterParameter] | None = None,
    ) -> None:
        """Allocates the stores, and fills them.

        Args:
            loaded: the weights with the state that they go on with; None before the first update.
        """
        self._updates = [int(weight.steps) for weight in loaded or ()] or [0] * len(masters)
        self._keep_factors([w.factors for w in loaded] if loaded else self._factors, staging)
        self._state.allocate()
        buffers = staging.sets[0]
        with self._state.open(write=True) as file:
            for part in self._parts:
                for memory, _ in self._parts.byte_ranges(buffers, part):
                    memory.zero_()
                views = self._parts.views(buffers, part)
                views.master.copy_(part.of(masters[part.weight].detach()))
                if loaded is None and self._first_moment_is_weight:
                    views.moments[0].values.copy_(views.master)
                weight = loaded[part.weight] if loaded else None
                sources = () if weight is None or weight.factors is not None else weight.moments
                for target, full in zip(views.moments, sources, strict=False):
                    moment = full.narrow(part.first, part.elements)
                    target.values.copy_(moment.values)
                    if target.scales is not None and moment.scales is not None:
                        target.scales.copy_(moment.scales)
                if views.average is not None:
                    average = None if weight is None else weight.average
                    start = masters[part.weight] if average is None else average
                    views.average.copy_(part.of(start.detach()))
                for memory, offset in self._parts.byte_ranges(buffers, part):
                    file.write(memory, offset)
            self._write_tail(file)
        self._create_other_stores(staging)

    def adopt(self, file: Path, staging: StagingBuffers) -> bool:
        """Takes its state from a checkpoint file without copying, if layout and moments agree.

        Returns:
            False if it must be copied, for which nothing was done.

        Raises:
            CheckpointError: the file is unreadable.
        """
        header = self._layout.header
        if not file.exists():
            return False
        with file.open("rb") as content:
            if content.read(len(header)) != header:
                return False
        counts = {f"steps/{name}": torch.zeros(()) for name in self._names}
        read_tensors(file, counts)
        self._updates = [int(count) for count in counts.values()]
        for name, factors in zip(self._names, self._factors, strict=True):
            if factors is not None:
                load_factors(file, name, factors)
        self._keep_factors(self._factors, staging)
        self._state.adopt_file(file)
        self._create_other_stores(staging)
        return True

    def save(self, to: Path) -> PendingChecksum:
        """Writes a checkpoint file of the current state."""
        return self._state.save_as(to, self._write_tail)

    def read_weights(self, memory: Tensor, stats: TransferStats) -> None:
        """Reads what the layer computes with into `memory`, `UInt8[working.nbytes]`."""
        if self._working is None:
            with self._state.open() as state:
                state.read(memory, self._layout.regions[0].offset)
        else:
            with self._working.open() as working:
                working.read(memory, 0)
        stats.read_bytes += memory.numel()

    def read_averages(
        self, memory: Tensor, averaging: Averaging, staging: StagingBuffers, stats: TransferStats
    ) -> None:
        """Makes what an evaluation computes with, in `memory`, `UInt8[working.nbytes]`."""
        targets, buffers = self.working.views(memory), staging.sets[0]
        with self._state.open() as state:
            for part in self._parts:
                for source, offset in self._parts.byte_ranges(buffers, part):
                    state.read(source, offset)
                    stats.read_bytes += source.numel()
                views = self._parts.views(buffers, part)
                kept = views.moments[0].values if views.average is None else views.average
                values = averaging.value(views.master, kept)
                part.of(targets[part.weight]).copy_(values)

    def write_grads(
        self, gradients: Sequence[Tensor | None], staging: StagingBuffers, stats: TransferStats
    ) -> None:
        """Writes the accumulated gradients; None for a weight without one."""
        dtype = self._gradient_region.dtype
        buffer = staging.sets[0][GRADIENT_BUFFER]
        with self._gradient_store().open(write=True) as file:
            for part in self._parts:
                gradient = gradients[part.weight]
                if gradient is not None:
                    memory, offset = self._gradient_range(buffer, part)
                    target = memory[: dtype.itemsize * part.elements].view(dtype)
                    target.copy_(part.of(gradient))
                    file.write(memory, offset)
                    stats.written_bytes += memory.numel()

    def update(
        self,
        request: LayerUpdate,
        staging: StagingBuffers,
        queue: TransferQueue,
        stats: TransferStats,
    ) -> None:
        """Takes one optimizer step for the whole layer."""
        with ExitStack() as stack:
            source, target = stack.enter_context(self._state.open_for_rewrite())
            gradients = None
            if request.gradients is None and any(request.has_gradient):
                gradients = stack.enter_context(self._gradient_store().open())

            def write(buffers: list[Tensor], part: Part) -> None:
                for memory, offset in self._parts.byte_ranges(buffers, part):
                    target.write(memory, offset)
                    stats.written_bytes += memory.numel()

            for index, update_pass in enumerate(request.passes):
                # What the first pass has written, the next one reads.
                state = source if index == 0 else target
                handles = (state, gradients if request.reads_gradient[index] else None)
                read = partial(self._read_part, handles, request, stats)
                compute = partial(self._update_part, update_pass, request, staging)
                queue.pipelined(list(self._parts), staging.sets, read, compute, write)
            counts = zip(self._updates, request.has_gradient, strict=True)
            self._updates = [count + has for count, has in counts]
            if target is not source:
                self._write_tail(target)
        if request.working_memory is not None and self._working is not None:
            with self._working.open(write=True) as file:
                file.write(request.working_memory, 0)
            stats.written_bytes += request.working_memory.numel()

    def _write_tail(self, file: StoreHandle) -> None:
        """Writes the update counts, and everything else that updates do not write."""
        tensors = [tensor.cpu() for _, tensor in self._tail()]
        write_tail(file, self._layout, self._updates, tensors)

    def _tail(self) -> Iterator[tuple[str, Tensor]]:
        """Key and tensor of what a checkpoint has beside the regions and the update counts."""
        for name, factors in zip(self._names, self._factors, strict=True):
            for kind, tensor in () if factors is None else factors.named:
                yield f"{kind}/{name}", tensor
        for name, buffer in self._buffers.items():
            yield f"buffer/{name}", buffer

    def _keep_factors(
        self, factors: Sequence[FactoredMoment | None], staging: StagingBuffers
    ) -> None:
        """Keeps second moments by rows and columns on the device that updates."""
        device = staging.converted.device
        self._factors = [each and each.on(device) for each in factors]

    def _gradient_store(self) -> BackingStore:
        if self._gradients is None:
            raise ValueError("this layer does not offload its gradients")
        return self._gradients

    def _gradient_range(self, memory: Tensor, part: Part) -> tuple[Tensor, int]:
        """The bytes of a buffer that hold a part of the gradient, and their offset in the file."""
        size = self._gradient_region.dtype.itemsize
        offset = self._gradient_region.extents[part.weight].offset + size * part.first
        return memory[: round_up_to_page(size * part.elements)], offset

    def _read_part(
        self,
        handles: tuple[StoreHandle, StoreHandle | None],
        request: LayerUpdate,
        stats: TransferStats,
        buffers: list[Tensor],
        part: Part,
    ) -> None:
        """Reads one part of the state, and of the gradients if a store of them is given."""
        state, gradients = handles
        for memory, offset in self._parts.byte_ranges(buffers, part):
            state.read(memory, offset)
            stats.read_bytes += memory.numel()
        if gradients is not None and request.has_gradient[part.weight]:
            memory, offset = self._gradient_range(buffers[GRADIENT_BUFFER], part)
            gradients.read(memory, offset)
            stats.read_bytes += memory.numel()

    def _update_part(
        self,
        update_pass: UpdatePass,
        request: LayerUpdate,
        staging: StagingBuffers,
        buffers: list[Tensor],
        part: Part,
    ) -> None:
        """Updates one part that has been read into the buffers."""
        index, count = part.weight, part.elements
        views = self._parts.views(buffers, part)
        if request.has_gradient[index]:
            gradient = None if request.gradients is None else request.gradients[index]
            if gradient is None:
                dtype = self._gradient_region.dtype
                gradient = buffers[GRADIENT_BUFFER][: dtype.itemsize * count].view(dtype)
            else:
                gradient = part.of(gradient)
            if gradient.dtype != torch.float32:
                gradient = staging.converted[:count].copy_(gradient)
            # A shard of a weight is named with its first element.
            name, _, first = self._layout.masters.extents[index].name.partition(SHARD_SEPARATOR)
            # Filled on the device: copying a number to it would make the host wait.
            updates = torch.full((), float(self._updates[index]), device=views.master.device)
            update_pass(
                Chunk(
                    name, part.first + int(first or 0), views.master, views.moments, gradient,
                    None, updates, self._decays[index], views.average, self._factors[index],
                )
            )  # fmt: skip
        part.of(request.weights[index].detach()).copy_(views.master)

    def _create_other_stores(self, staging: StagingBuffers) -> None:
        """Allocates the stores beside the state, and fills the working weights."""
        if self._working is not None:
            self._working.allocate()
            self._fill_working(self._working, staging)
        if self._gradients is not None and self._gradients is not self._working:
            self._gradients.allocate()

    def _fill_working(self, store: BackingStore, staging: StagingBuffers) -> None:
        """Makes the working weights from the masters."""
        dtype = self.working.dtype
        source, target = staging.sets[0][0], staging.sets[0][1]
        with self._state.open() as state, store.open(write=True) as file:
            for part in self._parts:
                offset, _ = self._layout.regions[0].byte_range(*part)
                state.read(source[: round_up_to_page(4 * part.elements)], offset)
                nbytes = dtype.itemsize * part.elements
                master = source[: 4 * part.elements].view(torch.float32)
                target[:nbytes].view(dtype).copy_(master)
                target[nbytes : round_up_to_page(nbytes)].zero_()
                offset = self.working.extents[part.weight].offset + dtype.itemsize * part.first
                file.write(target[: round_up_to_page(nbytes)], offset)
