"""Forward passes outside of a step: what held-out losses and task scores read of the engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from windlass.engines.torch.mesh import MeshRank
from windlass.engines.torch.stage import StageLayer
from windlass.engines.torch.weights import StageWeights
from windlass.program import stages_by_layer
from windlass.runtime import (
    DTYPES,
    NOT_LOADED,
    LayerParameters,
    LayerTemplate,
    ModelParameter,
    RankContext,
    batch_on_meta,
    output_shapes,
)


class PassWeights:
    """The weights of a rank for forward passes outside of a step."""

    def __init__(self, context: RankContext, stage: StageWeights) -> None:
        self._chunk_of = {
            layer.index: chunk for chunk in stage.chunks for layer in chunk.stage_layers
        }
        self._layers = {
            layer.index: layer for chunk in stage.chunks for layer in chunk.stage_layers
        }
        self.layers = tuple(
            _parameters(name, self._layers.get(index))
            for index, name in enumerate(context.stack.names)
        )
        """What each layer computes with; its weights are there between `load` and `free`."""

    def load_layers(self, layers: Sequence[int]) -> None:
        """Gathers the weights of layers."""
        for index in layers:
            for module in (self._chunk_of[index], self._layers[index]):
                if isinstance(module, FSDPModule):
                    module.unshard()
            current = self._layers[index].current_weights()
            for weight, tensor in zip(self.layers[index].used, current, strict=True):
                weight.working = tensor

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees what `load_layers` gathered."""
        for index in layers:
            for weight in self.layers[index].used:
                weight.working = NOT_LOADED
            for module in (self._layers[index], self._chunk_of[index]):
                if isinstance(module, FSDPModule):
                    module.reshard()

    def wait_for_layer(self, layer: int) -> None:
        """Returns at once: `load_layers` has waited."""

    @contextmanager
    def averaged(self, averaging: object) -> Iterator[NoReturn]:
        """Refused before: the stack's `can` names no averages."""
        raise NotImplementedError(f"{averaging} under the torch stack")
        yield


class StageMessages:
    """Sends outputs to the next stage, for a forward pass outside of a step."""

    def __init__(
        self, context: RankContext, ranks: MeshRank, templates: Sequence[LayerTemplate]
    ) -> None:
        self._ranks, self._stage_of = ranks, stages_by_layer(context.plan)
        self._shapes = output_shapes(templates, batch_on_meta(context))
        self._dtype, self._device = DTYPES[context.plan.precision], context.device.torch_device
        self._sends: list[tuple[Tensor, dist.Work]] = []
        """Messages under way. A stage of several chunks receives before all of them arrive."""

    def crosses_stages(self, layer: int) -> bool:
        """Whether a layer's output goes to or from this stage."""
        if not 0 <= layer < len(self._stage_of) - 1:
            return False
        ends = self._stage_of[layer], self._stage_of[layer + 1]
        return ends[0] != ends[1] and self._ranks.coord.stage in ends

    def receive_activation(self, layer: int, block: int, shape: torch.Size | None = None) -> Tensor:
        """The output of a layer of the previous stage.

        Args:
            layer: index of the layer.
            block: number of the batch; batches arrive in order.
            shape: shape of the output; None means that of a micro-batch.
        """
        del block
        size = self._shapes[layer] if shape is None else shape
        into = torch.empty(tuple(size), dtype=self._dtype, device=self._device)
        dist.recv(into, group_src=self._stage_of[layer], group=self._ranks.stage_group)
        return into

    def send_activation(self, layer: int, block: int, output: Tensor) -> None:
        """Sends the output of this stage's last layer to the next stage."""
        del block
        to = self._stage_of[layer + 1]
        tensor = output.detach().contiguous()
        work = dist.isend(tensor, group_dst=to, group=self._ranks.stage_group)
        if work is not None:
            self._sends.append((tensor, work))

    def send_tied_weights(self, phase: tuple[int, int]) -> None:
        """Does nothing: each stage has a copy of a tied weight."""

    def recv_tied_weights(self, phase: tuple[int, int]) -> None:
        """Does nothing: each stage has a copy of a tied weight."""

    def free_tied_weights(self) -> None:
        """Waits for messages; each stage keeps its copy of a tied weight."""
        for _, work in self._sends:
            work.wait()
        self._sends.clear()


def _parameters(name: str, layer: StageLayer | None) -> LayerParameters:
    """The parameters of a layer, not gathered; none of a layer of another stage."""
    names = () if layer is None else layer.template.parameters
    used = tuple(
        ModelParameter(name=f"{name}.{inner}", working=NOT_LOADED, shape=torch.Size())
        for inner in names
    )
    buffers = () if layer is None else layer.layer_buffers
    return LayerParameters(name=name, owned=(), used=used, buffers=buffers, persistent_buffers={})
