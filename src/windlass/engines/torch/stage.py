"""The layers of a rank as modules that PyTorch shards, recomputes and pipelines."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from windlass.engines.torch.step_data import StepData
from windlass.runtime import LayerTemplate
from windlass.schema import Recompute


class StageLayer(nn.Module):
    """One layer with its weights: all, or a tensor-parallel rank's part of them.

    Args:
        index: index of the layer in the model.
        template: computes it from its weights.
        weights: its parameters by name, those that other layers own included.
        buffers: in the order of the template's.
        data: what it takes beside its input.
        recompute: what it keeps of its forward pass.
    """

    def __init__(
        self,
        index: int,
        template: LayerTemplate,
        weights: Mapping[str, nn.Parameter],
        buffers: Sequence[Tensor],
        data: StepData,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        self.index, self.template, self.recompute = index, template, recompute
        self.layer_buffers = tuple(buffers)
        self._passed: set[int] = set()
        """Micro-batches of the step whose forward pass has run: one more repeats it."""
        self._data = data
        for name, weight in weights.items():
            self.register_parameter(_key(name), weight)

    def weight(self, name: str) -> nn.Parameter:
        """The parameter of a name as it is now: FSDP's shard, or all of it during a pass."""
        return self.get_parameter(_key(name))

    def current_weights(self) -> list[Tensor]:
        """All parameters as they are now, in the order of the template's."""
        return [self.weight(name) for name in self.template.parameters]

    def forward(self, x: Tensor, micro: int) -> Tensor:
        """The output for a micro-batch, or the loss of the last layer."""
        self._passed.discard(micro)
        if self.recompute != "full" or not torch.is_grad_enabled():
            output = self._run(x, micro)
        else:
            # What it draws, it draws again: each call is seeded.
            output = checkpoint(self._run, x, micro, use_reentrant=False, preserve_rng_state=False)
        if output.requires_grad:
            output.register_hook(lambda _: self._data.mark("backward", self.index, micro))
        return output

    def _run(self, x: Tensor, micro: int) -> Tensor:
        buffers: Sequence[Tensor] = self.layer_buffers
        if micro in self._passed and self.template.has_running_statistics:
            buffers = self.template.discarded_buffers(buffers)
        self._passed.add(micro)
        return self._data.call(
            self.template, self.index, micro, self.current_weights(), buffers, x,
            selective=self.recompute == "selective",
        )  # fmt: skip


class Chunk(nn.Module):
    """Consecutive layers of a rank: a pipeline stage, or one of its model chunks.

    Args:
        layers: its layers.
        data: what they take beside their inputs.
        sends: whether another stage takes what it gives, and sends back a gradient.
    """

    def __init__(self, layers: Iterable[StageLayer], data: StepData, *, sends: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._data, self._sends = data, sends

    @property
    def stage_layers(self) -> list[StageLayer]:
        """Its layers."""
        return [layer for layer in self.layers if isinstance(layer, StageLayer)]

    def forward(self, x: Tensor, *, micro: Tensor) -> Tensor:
        """The output for a micro-batch; of the last chunk the losses, `Float[1 result]`.

        Args:
            x: what the chunk before gives; the first chunk reads its own.
            micro: number of the micro-batch, `Int[1]` on the host.
        """
        number = int(micro)
        layers = self.stage_layers
        if layers[0].index == 0:
            x = self._data.tokens(number)[0]
        for layer in layers:
            x = layer(x, number)
        if self._sends:
            return x if x.requires_grad else x.requires_grad_()
        self._data.losses[number] = x.detach()
        return x.reshape(1, -1).clone()  # FSDP warns of views, which it must not be given


def _key(name: str) -> str:
    """A module's name for a parameter: without a dot, which torch refuses, and like no method's."""
    return f"/{name.replace('.', '/')}"
