"""ParamStore: where a rank's weights and optimizer state live, and how they are updated and saved.

Each layer falls into parts whose weights the same ranks share (`WeightPart`), and the plan says for
each part in which tier its weights, gradients and optimizer state are between uses. The store runs
an instruction of a layer on each of its parts. A group of one rank and the tier `device` do
nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

from torch import Tensor

from windlass.models import materialize_layer
from windlass.program import Program, layers_of_stage
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.safetensors_io import (
    HostStaging,
    SavedFile,
    host_staging,
    write_tensors,
)
from windlass.runtime.distributed.flat_weights import WeightPart, weight_parts
from windlass.runtime.distributed.process_groups import ProcessGroups, SingleProcess
from windlass.runtime.distributed.shards.device_layer import DeviceLayer
from windlass.runtime.distributed.shards.flat_shard import LayerShard
from windlass.runtime.distributed.shards.layer_part import LayerPart
from windlass.runtime.interpreter import Handler, Handlers
from windlass.runtime.offload.offload_tier import OffloadTier
from windlass.runtime.offload.offloaded_layer import OffloadedLayer
from windlass.runtime.offload.staging_buffers import StagingBuffers
from windlass.runtime.offload.transfer_queue import TransferQueue
from windlass.runtime.optimizer_state.optimizer_state import Averaging
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.parameters import LayerParameters, ModelParameter
from windlass.runtime.rank_context import RankContext


class ParamStore:
    """A rank's weights and optimizer state, as handlers, training loop and saver see them.

    Args:
        queue: the queue of all transfers; None if the plan offloads nothing.
    """

    def __init__(
        self, context: RankContext, optimizer: Optimizer, groups: ProcessGroups | None = None,
        queue: TransferQueue | None = None, *, before_update: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._context, self._groups, self._optimizer = context, groups, optimizer
        self._before_update = before_update
        self._rank = groups or SingleProcess()
        self._weight_parts = weight_parts(context.plan, self._rank.coord, self._rank.experts)
        self._tiers: tuple[OffloadTier, ...] = ()
        """One for each part of the weights; none if all are in device memory."""
        self._staging: HostStaging | None = None
        self._queue = queue if context.plan.is_offloaded("optimizer") else None
        if self._queue is None:
            self._staging = host_staging(context.device)
        else:
            staging = StagingBuffers(context.device, context.plan)
            self._tiers = tuple(
                OffloadTier(context, part, optimizer, self._queue, staging, before_update)
                for part in self._weight_parts
            )
        self._parts: dict[int, tuple[LayerPart, ...]] = {}
        """What this rank keeps of each layer of its stage."""
        self.layers: tuple[LayerParameters, ...] = tuple(self._create_layers())
        """The parameters that each layer computes with."""
        self._owners = _owners_of_weights(self.layers)
        """For each layer, the layers of this stage that own the weights it computes with."""
        self._resident = self._owners_between_steps()
        """The layers whose weights are in device memory between steps."""
        if groups is not None and not self._tiers:
            self._free_model()

    # The state at the start.

    def _create_layers(self) -> Iterator[LayerParameters]:
        stack, stage = self._context.stack, self._rank.coord.stage
        local_layers = layers_of_stage(self._context.plan, stage)
        by_name: dict[str, ModelParameter] = {}
        for index, name in enumerate(stack.names):
            if index not in local_layers:
                yield LayerParameters(
                    name=name, owned=(), used=(), buffers=(), persistent_buffers={}
                )
                continue
            parts = self._parts[index] = tuple(self._create_parts(index))
            yield parts[0].shard.layer_parameters(
                by_name, stack.tied_weights,
                owned=tuple(weight for part in parts for weight in part.owned),
                frozen=tuple(weight for part in parts for weight in part.shard.frozen),
            )  # fmt: skip

    def _create_parts(self, index: int) -> Iterator[LayerPart]:
        """The parts of a layer; parts after the first only if they have weights."""
        context, layer = self._context, self._context.stack.layers[index]
        # Buffers are small and stay in device memory.
        if not self._tiers or any(True for _ in layer.buffers()):
            layer = materialize_layer(
                context.stack, index, seed=context.seed, tied=False,
                device=str(context.device.torch_device),
            )  # fmt: skip
        for number, part in enumerate(self._weight_parts):
            shard = LayerShard(context, self._groups, index, layer, part)
            if number and not shard.pieces:
                continue
            if self._tiers:
                yield OffloadedLayer(self._tiers[number], shard)
            else:
                yield DeviceLayer(shard, layer, context.plan, self._optimizer)

    def _free_model(self) -> None:
        """Frees a model that was built in full: its weights are kept here."""
        for layer in self._context.stack.layers:
            layer.to_empty(device="meta")

    def _owners_between_steps(self) -> frozenset[int]:
        """All layers that the stage uses; if parameters are offloaded those of its first phase."""
        plan, stage = self._context.plan, self._rank.coord.stage
        layers: Sequence[int] = layers_of_stage(plan, stage)
        if plan.is_offloaded("parameters"):
            layers = range(*plan.stages[stage].phases[0])
        return frozenset(owner for layer in layers for owner in self._owners[layer])

    def initialize(self, checkpoint: Checkpoint | None) -> None:
        """Creates the state of a new run, or loads that of a checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        for tier in self._tiers:
            tier.allocate()
        for index, part in self._all_parts():
            part.initialize(checkpoint, self.layers[index])
        if self._tiers:
            self._free_model()
            self._load_resident()

    def _load_resident(self) -> None:
        """Brings in the layers that stay in device memory between steps."""
        resident = [part for owner in sorted(self._resident) for part in self._parts[owner]]
        for part in resident:
            part.load()
        self._wait()
        for part in resident:
            part.gather_first()

    def _all_parts(self) -> Iterator[tuple[int, LayerPart]]:
        for index, parts in self._parts.items():
            yield from ((index, part) for part in parts)

    # Instructions.

    def handlers(self) -> Handlers:
        """The handlers of transfers and of collectives on weights and gradients."""

        def of(act: Callable[[LayerPart], None]) -> Handler:
            def run(layer: int, _: int) -> None:
                for part in self._parts[layer]:
                    act(part)

            return run

        return {
            "prefetch_weights": of(lambda part: part.prefetch()),
            "unshard_weights": of(lambda part: part.unshard()),
            "free_weights": of(lambda part: part.free()),
            "free_shard": of(lambda part: part.free_shard()),
            "reduce_grads": of(lambda part: part.shard.start_reduce()),
            "offload_grads": of(lambda part: part.offload_grads()),
            "all_gather_params": of(lambda part: part.all_gather_params()),
        }

    def begin_step(self, step: int) -> None:
        """Prepares for a step, counted from 1, and drops the gradients of one that was aborted."""
        for tier in self._tiers:
            tier.step = step
        for _, part in self._all_parts():
            part.drop_gradients()

    @property
    def offloaded_grad_norms(self) -> Mapping[int, list[Tensor]]:
        """Norms of this step's gradients that have been offloaded, by layer."""
        norms: dict[int, list[Tensor]] = {}
        for tier in self._tiers:
            for layer, own in tier.gradients.norms.items():
                norms.setdefault(layer, []).extend(own if self._counts(tier.part) else ())
        return norms

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """Parameters whose gradients this rank contributes to the norm, each element once."""
        by_part = [(part, part.grads_for_norm()) for part in self._parts.get(layer, ())]
        return tuple(
            weight
            for part, weights in by_part
            if self._counts(part.shard.part)
            for weight in weights
        )

    def _counts(self, part: WeightPart) -> bool:
        """Whether a part counts in the norm of this rank; the only one counts or is left out."""
        return len(self._weight_parts) == 1 or part.is_first_copy

    @property
    def counts_in_norm(self) -> bool:
        """Whether these gradients count in the norm: several ranks hold each shard.

        Where experts are divided, `grads_for_norm` leaves out what does not count.
        """
        return len(self._weight_parts) > 1 or self._weight_parts[0].is_first_copy

    def wait_for_layer(self, layer: int) -> None:
        """Blocks until all weights that a layer computes with are in device memory.

        Raises:
            StorageError: they cannot be read.
        """
        for owner in self._owners[layer]:
            for part in self._parts[owner]:
                part.wait(layer)

    def drop_gradients(self) -> None:
        """Drops all gradients of this step, so that its updates change no weight."""
        for _, part in self._all_parts():
            part.drop_gradients()
        for tier in self._tiers:
            tier.gradients.drop()

    def finish_backward(self, clip_divisor: Tensor | None) -> None:
        """Ends the backward pass: all gradients are there, to be divided by `clip_divisor`."""
        for tier in self._tiers:
            tier.gradients.finish_backward(clip_divisor)

    def update(self, layer: int, step: int, clip_divisor: Tensor | None) -> None:
        """Updates a layer, or starts to."""
        if not self._tiers:
            self._before_update(layer)
        for part in self._parts[layer]:
            part.update(step, clip_divisor)

    def flush_deferred_updates(self, program: Program) -> None:
        """Applies the updates that were deferred to the next step."""
        for kind, layer, _ in program.flush_deferred_updates if self._tiers else ():
            for part in () if layer is None else self._parts.get(layer, ()):
                if kind == "update":
                    part.update(0, None)
                elif kind in ("free_weights", "free_shard"):
                    part.free_own()
        self._wait()

    def _wait(self) -> None:
        """Returns when all transfers have ended."""
        if self._queue is not None:
            for _, part in self._all_parts():
                part.wait_for_transfer()
            self._queue.wait()

    def load_layers(self, layers: Sequence[int]) -> None:
        """Brings layers into device memory for a forward pass outside of a step."""
        parts = self._parts_used_by(layers)
        for _, part in parts:
            part.load()
        for _, part in parts:
            part.gather()

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees what `load_layers` brought in; what is there between steps stays."""
        for owner, part in self._parts_used_by(layers):
            part.unload(stays=owner in self._resident)

    def _parts_used_by(self, layers: Sequence[int]) -> list[tuple[int, LayerPart]]:
        """All that some layers compute with, with the indices of the layers that own it."""
        owners = sorted({owner for layer in layers for owner in self._owners[layer]})
        return [(owner, part) for owner in owners for part in self._parts[owner]]

    @contextmanager
    def averaged(self, averaging: Averaging) -> Iterator[None]:
        """Lets layers compute with averaged weights while it is open.

        Then they compute with the trained weights again, which stay as they are to the last bit.
        All ranks open it together, between steps and with no update deferred.
        """
        self._wait()
        with ExitStack() as stack:
            for _, part in self._all_parts():
                stack.enter_context(part.averaged(averaging))
            stack.callback(self._wait)
            self._load_resident()
            yield

    def block_norms(self, layer: int, name: str) -> Tensor:
        """`Float32[n]`: norm of each kept block of a sparse weight, the same on all its ranks.

        Args:
            name: full name of the values, `[n B B]`.
        """
        return self._on_device(layer).block_norms(name)

    def reset_blocks(self, layer: int, name: str, slots: Tensor) -> None:
        """Zeroes kept blocks of a sparse weight and their optimizer state, between two steps.

        Args:
            name: full name of the values, `[n B B]`.
            slots: positions of the blocks in the full values, `Int64[m]`.
        """
        self._on_device(layer).reset_blocks(name, slots)

    def _on_device(self, layer: int) -> DeviceLayer:
        part = self._parts[layer][0]
        if not isinstance(part, DeviceLayer):
            raise TypeError("masks change only where the optimizer state is in device memory")
        return part

    def save_layer(self, layer: int, to: Path) -> tuple[SavedFile, ...]:
        """Saves what this rank saves of a layer's state, which may change once this returns.

        Args:
            to: the file for a full layer; a shard is written to a file beside it.

        Returns:
            Its files; none if this rank has nothing to write.
        """
        parts = [part for part in self._parts.get(layer, ()) if part.shard.is_saved]
        saved = [part.save(to) for part in parts if isinstance(part, OffloadedLayer)]
        on_device = [part for part in parts if isinstance(part, DeviceLayer)]
        if on_device:
            tensors = chain.from_iterable(part.saved_tensors() for part in on_device)
            file = on_device[0].shard.checkpoint_file(to)
            saved.append(write_checkpoint_file(tensors, file, self._staging))
        return tuple(chain.from_iterable(saved))

    def close(self) -> None:
        """Frees what transfers and saves passed through; the queue must have ended."""
        for tier in reversed(self._tiers):
            tier.close()
        if self._staging is not None:
            self._staging.close()


def _owners_of_weights(layers: Sequence[LayerParameters]) -> tuple[list[int], ...]:
    owner = {
        weight.name: index
        for index, layer in enumerate(layers)
        for weight in (*layer.owned, *layer.frozen)
    }
    return tuple(
        sorted({owner[weight.name] for weight in layer.used if weight.name in owner})
        for layer in layers
    )


def write_checkpoint_file(
    named: Iterable[tuple[str, Tensor]],
    to: Path,
    staging: HostStaging | None,
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> tuple[SavedFile, ...]:
    """Writes a checkpoint file from (key, tensor) pairs; none if there are none.

    Args:
        staging: what an accelerator's tensors pass through; None if they are in host memory.
        offsets: where each begins in the full tensor that it is a part of; None if they are full.
    """
    tensors = dict(named)
    if not tensors:
        return ()
    checksum = write_tensors(to, tensors.items(), staging, offsets)
    return (SavedFile(to, lambda: checksum),)
