"""Occupancy: how full the tiers of a device are while each instruction of its program runs."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import GRADIENT_PASSES, Instruction, Program
from windlass.program.memory.effects import InstructionEffects
from windlass.program.memory.values import MEMORY_CLASS, Effect
from windlass.schema.graph import Graph
from windlass.schema.plan import DEVICE_TIER, Plan
from windlass.schema.prediction import MemoryClass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes of one tier over one program, and what they are at the fullest moment."""

    tier: str
    bytes_by_instruction: tuple[int, ...]
    """While each instruction runs."""
    peak_instruction: int
    """Index of the instruction at the fullest moment, the first if there are several."""
    by_class: dict[MemoryClass, int]
    """At the fullest moment; its values sum to the peak."""

    @property
    def peak_bytes(self) -> int:
        """At the fullest moment."""
        return self.bytes_by_instruction[self.peak_instruction] if self.bytes_by_instruction else sum(self.by_class.values())


_Key = tuple[str, int | None, bool]
"""Kind, layer, and whether a backward finds no gradient yet: what an effect's sizes depend on."""


class _Delta(NamedTuple):
    """Bytes that an instruction adds and takes away, and the effect that says so."""

    made: int
    working: int
    freed: int
    effect: Effect


def memory_profile(program: Program, plan: Plan, graph: Graph, *, runtime_bytes: int = 0) -> MemoryProfile:
    """How full the near tier is over one program.

    Args:
        program: of one device.
        plan: that the program was lowered from.
        graph: that the plan cuts.
        runtime_bytes: what the process holds before any tensor.
    """
    effects = InstructionEffects(plan, graph, mesh_coord(program.device, plan.parallel).stage)
    resident = _resident(effects, runtime_bytes)
    now = sum(resident.values())
    keys, known = _keys(program.instructions, effects)
    filled: list[int] = []
    for key in keys:
        made, working, freed, _ = known[key]
        filled.append(now + made + working)
        now += made - freed
    if not keys:
        return MemoryProfile(tier=DEVICE_TIER, bytes_by_instruction=(), peak_instruction=0, by_class=resident)
    peak = filled.index(max(filled))
    by_class = dict(resident)
    for key, times in Counter(keys[:peak]).items():
        effect = known[key].effect
        for value in effect.makes:
            by_class[MEMORY_CLASS[value.name]] += times * effects.bytes_of(value)
        for value in effect.frees:
            by_class[MEMORY_CLASS[value.name]] -= times * effects.bytes_of(value)
    last = known[keys[peak]].effect
    for value in last.makes:
        by_class[MEMORY_CLASS[value.name]] += effects.bytes_of(value)
    by_class["working"] += last.working_bytes
    return MemoryProfile(tier=DEVICE_TIER, bytes_by_instruction=tuple(filled), peak_instruction=peak, by_class=by_class)


def _resident(effects: InstructionEffects, runtime_bytes: int) -> dict[MemoryClass, int]:
    classes: dict[MemoryClass, int] = {
        "weights": 0, "gradients": 0, "optimizer": 0, "activations": 0, "working": 0,
        "runtime": runtime_bytes,
    }  # fmt: skip
    for value in effects.resident_tensors:
        classes[MEMORY_CLASS[value.name]] += effects.bytes_of(value)
    return classes


def _keys(
    instructions: tuple[Instruction, ...], effects: InstructionEffects
) -> tuple[list[_Key], dict[_Key, _Delta]]:
    """What each instruction's effect depends on, and the effect of each.

    Sizes do not depend on the micro-batch, and equal layers have equal sizes. So a program of
    20,000 instructions has a dozen effects, and takes milliseconds.
    """
    known: dict[_Key, _Delta] = {}
    equal: dict[Hashable, _Delta] = {}
    made: set[int] = set()
    keys: list[_Key] = []
    for instruction in instructions:
        kind, layer, _ = instruction
        key = (kind, layer, kind in GRADIENT_PASSES and layer not in made)
        keys.append(key)
        if key not in known:
            signature = effects.signature(instruction, made)
            if signature not in equal:
                equal[signature] = _delta(effects.effect_of(instruction, made), effects)
            known[key] = equal[signature]
            if kind in GRADIENT_PASSES and layer is not None:
                made.update(effects.gradient_targets(layer))
    return keys, known


def _delta(effect: Effect, effects: InstructionEffects) -> _Delta:
    made = sum(map(effects.bytes_of, effect.makes))
    freed = sum(map(effects.bytes_of, effect.frees))
    return _Delta(made, effect.working_bytes, freed, effect)
