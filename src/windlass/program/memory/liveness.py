"""Liveness: device memory in use while each instruction of a program runs."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import GRADIENT_PASSES, Instruction, Program
from windlass.program.memory.effects import InstructionEffects
from windlass.program.memory.values import MEMORY_CLASS, Effect, TensorId
from windlass.schema import DEVICE_TIER, Graph, MemoryClass, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes in use of one tier over one program, by class at the peak."""

    tier: str
    bytes_by_instruction: tuple[int, ...]
    """Bytes in use while each instruction runs, [instruction]."""
    changes: tuple[int, ...]
    """Bytes that each instruction leaves, negative if it frees more than it makes."""
    peak_instruction: int
    """Index of the instruction at the peak, the first if there are several."""
    by_class: dict[MemoryClass, int]
    """Bytes of each class at the peak; they sum to the peak."""

    @property
    def peak_bytes(self) -> int:
        """Bytes in use at the peak."""
        if self.bytes_by_instruction:
            return self.bytes_by_instruction[self.peak_instruction]
        return sum(self.by_class.values())


_Key = tuple[str, int | None, bool]
"""Kind, layer, and whether a backward pass makes its gradient: they determine an effect's sizes."""


class _Delta(NamedTuple):
    """Bytes that an instruction allocates and frees, and the effect that causes them."""

    made: int
    working: int
    freed: int
    effect: Effect


def memory_profile(
    program: Program, plan: Plan, graph: Graph, *, runtime_bytes: int = 0
) -> MemoryProfile:
    """Device memory in use over one program.

    Args:
        runtime_bytes: memory of the process before it allocates any tensor.
    """
    effects = InstructionEffects(plan, graph, mesh_coord(program.device, plan.parallel).stage)
    resident = _resident_by_class(effects, runtime_bytes)
    current = sum(resident.values())
    keys, deltas = _find_deltas(program.instructions, effects)
    in_use: list[int] = []
    changes: list[int] = []
    for key in keys:
        made, working, freed, _ = deltas[key]
        in_use.append(current + made + working)
        changes.append(made - freed)
        current += made - freed
    if not keys:
        return MemoryProfile(
            tier=DEVICE_TIER, bytes_by_instruction=(), changes=(), peak_instruction=0,
            by_class=resident,
        )  # fmt: skip
    peak = in_use.index(max(in_use))
    by_class = dict(resident)
    for key, times in Counter(keys[:peak]).items():
        effect = deltas[key].effect
        for tensor in effect.makes:
            by_class[MEMORY_CLASS[tensor.name]] += times * effects.bytes_of(tensor)
        for tensor in effect.frees:
            by_class[MEMORY_CLASS[tensor.name]] -= times * effects.bytes_of(tensor)
    last = deltas[keys[peak]].effect
    for tensor in last.makes:
        by_class[MEMORY_CLASS[tensor.name]] += effects.bytes_of(tensor)
    by_class["working"] += last.working_bytes
    return MemoryProfile(
        tier=DEVICE_TIER,
        bytes_by_instruction=tuple(in_use),
        changes=tuple(changes),
        peak_instruction=peak,
        by_class=by_class,
    )


def _resident_by_class(effects: InstructionEffects, runtime_bytes: int) -> dict[MemoryClass, int]:
    classes: dict[MemoryClass, int] = {
        "weights": 0,
        "gradients": 0,
        "optimizer": 0,
        "activations": 0,
        "working": 0,
        "runtime": runtime_bytes,
    }
    for tensor in effects.resident_tensors:
        classes[MEMORY_CLASS[tensor.name]] += effects.bytes_of(tensor)
    return classes


def _find_deltas(
    instructions: tuple[Instruction, ...], effects: InstructionEffects
) -> tuple[list[_Key], dict[_Key, _Delta]]:
    """The key of each instruction, and the change in memory for each key.

    Sizes do not depend on the micro-batch, and equal layers have equal sizes. So a program of
    20,000 instructions has a dozen effects, and takes milliseconds.
    """
    by_key: dict[_Key, _Delta] = {}
    by_signature: dict[Hashable, _Delta] = {}
    sums: set[TensorId] = set()
    ran: set[int] = set()
    keys: list[_Key] = []
    for instruction in instructions:
        kind, layer, _ = instruction
        key = (kind, layer, kind in GRADIENT_PASSES and layer not in ran)
        keys.append(key)
        if key not in by_key:
            signature = effects.signature(instruction, sums)
            if signature not in by_signature:
                effect = effects.effect_of(instruction, sums)
                by_signature[signature] = _delta(effect, effects)
            by_key[key] = by_signature[signature]
            if kind in GRADIENT_PASSES and layer is not None:
                ran.add(layer)
                sums.update(effects.tensors.pass_gradient_sums(layer))
    return keys, by_key


def _delta(effect: Effect, effects: InstructionEffects) -> _Delta:
    made = sum(map(effects.bytes_of, effect.makes))
    freed = sum(map(effects.bytes_of, effect.frees))
    return _Delta(made, effect.working_bytes, freed, effect)
