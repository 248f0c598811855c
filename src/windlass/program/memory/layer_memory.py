"""Device memory of each layer's tensors over one program."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import GRADIENT_PASSES, Program
from windlass.program.memory.effects import InstructionEffects
from windlass.program.memory.layer_sizes import plan_layer_sizes
from windlass.program.memory.values import TensorId
from windlass.schema import Graph, Plan


class LayerUse(NamedTuple):
    """Bytes that a layer takes from one of its instructions on, up to the next one."""

    instruction: int
    """Index in the program."""
    during: int
    """While the instruction runs, with what it makes and its temporary memory."""
    after: int


class _Change(NamedTuple):
    """What an instruction does to the bytes of each layer; None stands for those of no layer."""

    made: Mapping[int | None, int]
    working: int
    freed: Mapping[int | None, int]


def memory_by_layer(
    program: Program, plan: Plan, graph: Graph
) -> dict[int | None, tuple[LayerUse, ...]]:
    """How much device memory the tensors of each layer take over one program.

    Summed over layers it is `memory_profile` without the memory of the process.

    Returns:
        By layer, the instructions that change what it takes, in order. The first entry is what it
        takes before the first instruction, and has index 0. None stands for tensors of no layer.
    """
    effects = InstructionEffects(plan, graph, mesh_coord(program.device, plan.parallel).stage)
    held = _by_layer(effects.resident_tensors, effects)
    uses = {layer: [LayerUse(0, nbytes, nbytes)] for layer, nbytes in held.items()}
    for index, (layer, change) in enumerate(_changes(program, effects)):
        for changed in {*change.made, *change.freed, *((layer,) if change.working else ())}:
            during = held[changed] + change.made.get(changed, 0)
            held[changed] = during - change.freed.get(changed, 0)
            if changed == layer:
                during += change.working
            before = uses.setdefault(changed, [LayerUse(0, 0, 0)])
            before.append(LayerUse(index, during, held[changed]))
    return {layer: tuple(each) for layer, each in uses.items()}


def _changes(program: Program, effects: InstructionEffects) -> list[tuple[int | None, _Change]]:
    """Layer and change of each instruction; sizes do not depend on the micro-batch."""
    known: dict[tuple[str, int | None, bool], _Change] = {}
    sums: set[TensorId] = set()
    ran: set[int] = set()
    found = []
    for instruction in program.instructions:
        kind, layer, _ = instruction
        makes_gradient = kind in GRADIENT_PASSES
        key = (kind, layer, makes_gradient and layer not in ran)
        if key not in known:
            effect = effects.effect_of(instruction, sums)
            known[key] = _Change(
                made=_by_layer(effect.makes, effects),
                working=effect.working_bytes,
                freed=_by_layer(effect.frees, effects),
            )
        if makes_gradient and layer is not None:
            ran.add(layer)
            sums.update(effects.tensors.pass_gradient_sums(layer))
        found.append((layer, known[key]))
    return found


def _by_layer(tensors: tuple[TensorId, ...], effects: InstructionEffects) -> Counter[int | None]:
    """Bytes of tensors, by their layer."""
    sizes = Counter[int | None]()
    for tensor in tensors:
        sizes[tensor.layer] += effects.bytes_of(tensor)
    return sizes


_TOKEN_BYTES = 16
"""Input and target of a token, as 64-bit integers."""


def evaluation_bytes(plan: Plan, graph: Graph) -> int:
    """Bytes that a plan in device memory on one device allocates for a held-out micro-batch.

    Layers run one after the other, each with its input, as in a forward pass of training.

    Args:
        plan: states micro-batch and sequence.
    """
    sizes = plan_layer_sizes(plan, graph)
    inputs = (0, *(each.output for each in sizes[:-1]))
    passes = (each.forward_peak + entering for each, entering in zip(sizes, inputs, strict=True))
    return max(passes) + _TOKEN_BYTES * plan.batch.micro * plan.batch.sequence
