"""Messages: what a device does when it sends, receives, lends and borrows."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from windlass.models.layer_stack import Chain
from windlass.program.device_mesh import stages_by_layer
from windlass.program.instruction import Instruction, Kind
from windlass.program.memory.stage_tensors import Holding
from windlass.program.tied_weights import Loan
from windlass.runtime.compute import Flow
from windlass.runtime.distributed.process_groups import Pod
from windlass.runtime.interpreter import Handler
from windlass.runtime.layer_templates import Template
from windlass.runtime.parameters import AWAY, DTYPES, LayerParameters, sum_dtype
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan


class Messages:
    """The handlers of messages between stages.

    Args:
        plan: the plan.
        graph: that it cuts.
        chain: the model.
        pod: sends them.
        layers: what layers compute with; of other stages, nothing.
        templates: one for each layer.
        on: where tensors lie.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        chain: Chain,
        pod: Pod,
        layers: Sequence[LayerParameters],
        templates: Sequence[Template],
        on: torch.device,
    ) -> None:
        self._plan, self._pod, self._on = plan, pod, on
        self._holding = Holding(plan, graph, pod.place.stage)
        shapes = output_shapes(templates, plan.batch.micro, plan.batch.sequence)
        self._shapes = {layer: shapes[layer] for layer in self._holding.boundaries}
        known = {weight.name: weight for layer in layers for weight in (*layer.owned, *layer.used)}
        self._lent = {
            name: [known[full] for full in lent_names(chain, loan, plan)]
            for name, loan in (*self._holding.lends.items(), *self._holding.borrows.items())
        }
        self.flow = Flow()
        """Of the step that runs."""

    def handlers(self) -> Mapping[Kind, Handler]:
        """The handler of each kind of message."""
        return {
            "send": self._send,
            "receive": self._receive,
            "send_tied_weights": self._lend,
            "recv_tied_weights": self._borrow,
            "send_tied_grads": self._hand_over,
            "accumulate_tied_grads": self._take_over,
        }

    def before(self, phase: tuple[int, int]) -> None:
        """Borrows what a phase needs, for a forward pass outside of a step."""
        for layer in self._holding.borrows:
            if phase[0] <= layer < phase[1]:
                self._borrow(layer, 0)

    def lend_of(self, phase: tuple[int, int]) -> None:
        """Lends weights of a phase that are whole now, for a forward pass outside of a step."""
        for layer, loan in self._holding.lends.items():
            if phase[0] <= loan.owner < phase[1]:
                self._lend(layer, 0)

    def give_back(self) -> None:
        """Lets go of what was borrowed."""
        for layer in self._holding.borrows:
            for weight in self._lent[layer]:
                weight.working = AWAY

    def come(self, layer: int, block: int) -> Tensor:
        """The output of a layer before this stage, for a forward pass outside of a step."""
        self._receive(layer, block)
        return self.flow.outputs.pop((layer, block))

    def go(self, layer: int, block: int, output: Tensor) -> None:
        """Sends the output of this stage's last layer on."""
        self.flow.outputs[layer, block] = output
        self._send(layer, block)

    def crosses(self, layer: int) -> bool:
        """Whether a layer's output goes from one stage to another, and this is one of them."""
        return layer in self._holding.boundaries

    def _send(self, layer: int, micro: int) -> None:
        onward = layer in self._holding.on
        values = self.flow.outputs if onward else self.flow.gradients
        self._pod.send(Instruction("send", layer, micro), values.pop((layer, micro)))

    def _receive(self, layer: int, micro: int) -> None:
        onward = layer not in self._holding.on
        values = self.flow.outputs if onward else self.flow.gradients
        into = self._room(self._shapes[layer], DTYPES[self._plan.precision])
        values[layer, micro] = self._pod.receive(Instruction("receive", layer, micro), into)

    def _lend(self, layer: int, _: int) -> None:
        tensors = [weight.working.detach() for weight in self._lent[layer]]
        self._pod.send(Instruction("send_tied_weights", layer), _flat(tensors))

    def _borrow(self, layer: int, _: int) -> None:
        weights = self._lent[layer]
        flat = self._came(Instruction("recv_tied_weights", layer), DTYPES[self._plan.precision])
        for weight, part in zip(weights, self._parts(layer, flat), strict=True):
            weight.working = part.requires_grad_()

    def _hand_over(self, layer: int, _: int) -> None:
        dtype = sum_dtype(self._plan)
        sums: list[Tensor] = []
        for weight in self._lent[layer]:
            weight.complete()
            found = weight.gradient
            sums.append(torch.zeros_like(weight.working, dtype=dtype) if found is None else found)
        self._pod.send(Instruction("send_tied_grads", layer), _flat(sums))
        for weight in self._lent[layer]:
            weight.forget()
            weight.working = AWAY

    def _take_over(self, layer: int, _: int) -> None:
        flat = self._came(Instruction("accumulate_tied_grads", layer), sum_dtype(self._plan))
        for weight, part in zip(self._lent[layer], self._parts(layer, flat), strict=True):
            weight.add(part, summed=self._plan.batch.accumulation > 1)

    def _came(self, instruction: Instruction, dtype: torch.dtype) -> Tensor:
        # Of an uneven vocabulary not every slice has as many rows as the first, which loans tell.
        elements = sum(weight.shape.numel() for weight in self._lent[instruction.layer or 0])
        return self._pod.receive(instruction, self._room((elements,), dtype))

    def _parts(self, layer: int, flat: Tensor) -> list[Tensor]:
        """A flat message as tensors of its weights' shapes."""
        shapes = [weight.shape for weight in self._lent[layer]]
        pieces = flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._on)


def lent_names(chain: Chain, loan: Loan, plan: Plan) -> tuple[str, ...]:
    """Full names of the weights of a loan, in the order of its message."""
    stage = loan.borrower
    names = [
        owner
        for tied, owner in chain.ties.items()
        if owner.startswith(f"{chain.names[loan.owner]}.") and _stage_of(chain, tied, plan) == stage
    ]
    return tuple(dict.fromkeys(names))


def output_shapes(
    templates: Sequence[Template], micro: int, sequence: int
) -> tuple[torch.Size, ...]:
    """The shape of each layer's output for one micro-batch, found without numbers."""
    x = torch.zeros(micro, sequence, dtype=torch.int64, device="meta")
    known: dict[tuple[int, torch.Size], Tensor] = {}
    shapes: list[torch.Size] = []
    for template in templates:
        key = (id(template), x.shape)
        if key not in known:
            known[key] = template.bare_output(x)
        x = known[key]
        shapes.append(x.shape)
    return tuple(shapes)


def _stage_of(chain: Chain, full: str, plan: Plan) -> int:
    layer = next(i for i, name in enumerate(chain.names) if full.startswith(f"{name}."))
    return stages_by_layer(plan)[layer]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
