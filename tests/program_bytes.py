"""What the program of a device sends in a step."""

from collections import Counter

from windlass.program.communication_volume import CommunicationVolume
from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import InstructionKind
from windlass.program.lowering.lower import lower
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan


def sent_bytes_by_kind(plan: Plan, graph: Graph, device: int) -> dict[InstructionKind, int]:
    """Bytes that a device sends in one step, by kind; kinds that send nothing are left out."""
    volume = CommunicationVolume(plan, graph, mesh_coord(device, plan.parallel).tensor_rank)
    totals: Counter[InstructionKind] = Counter()
    for instruction in lower(plan, graph)[device].instructions:
        totals[instruction.kind] += volume.sent_bytes(instruction)
    return {kind: sent for kind, sent in totals.items() if sent}
