"""Peers: with whom each instruction of a device exchanges."""

from windlass.program.device_mesh import MeshCoord, rank_of, mesh_coord
from windlass.program.instruction import COLLECTIVE_KINDS, Instruction, InstructionKind
from windlass.program.tensor_parallel import PASSES, exchanging
from windlass.program.tied_weights import loans
from windlass.program.zero_sharding import gathering, spreading
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan

_FROM_OWNER: tuple[InstructionKind, ...] = ("send_tied_weights", "accumulate_tied_grads")
_LOANS: tuple[InstructionKind, ...] = (*_FROM_OWNER, "recv_tied_weights", "send_tied_grads")


def group_of(instruction: Instruction, device: int, plan: Plan) -> tuple[int, ...]:
    """The devices that an instruction brings together, in the order of what each has of the whole.

    For a pass the slices of one stage and replica. For a reduction all replicas of a stage and
    their slices: whole parameters are summed over slices, then all over replicas. For `gather`
    those replicas that share the weights, for `spread` those that updated parts of one shard; else
    all devices.
    """
    place = mesh_coord(device, plan.parallel)
    if instruction.kind in PASSES:
        slices = range(plan.parallel.tensor)
        return tuple(rank_of(place._replace(slice=index), plan.parallel) for index in slices)
    if instruction.kind == "reduce_grads":
        first = rank_of(place._replace(slice=0, replica=0), plan.parallel)
        return tuple(range(first, first + plan.parallel.data * plan.parallel.tensor))
    if instruction.kind == "unshard_weights":
        replicas: tuple[int, ...] = gathering(place.data_rank, plan)
    elif instruction.kind == "all_gather_params":
        replicas = spreading(place.data_rank, plan)
    else:
        return tuple(range(plan.parallel.devices))
    return tuple(rank_of(place._replace(replica=replica), plan.parallel) for replica in replicas)


class Peers:
    """Who is at the other end of each message of a plan, and where devices meet.

    Args:
        plan: the plan.
        graph: that it cuts.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._cut = plan.parallel
        self._exchanging = exchanging(plan, graph)
        stages = plan.parallel.pipeline
        self._ends = {
            part.last - 1: (chunk % stages, (chunk + 1) % stages)
            for chunk, part in enumerate(plan.stages[:-1])
        }
        self._loans = {
            (loan.user_layer, stage): (loan.user_stage if stage == loan.owner_stage else loan.owner_stage)
            for loan in loans(plan, graph)
            for stage in (loan.owner_stage, loan.user_stage)
        }

    def meets(self, instruction: Instruction) -> bool:
        """Whether an instruction waits until every device of its group is there."""
        kind, layer, _ = instruction
        return kind in COLLECTIVE_KINDS or (kind, layer) in self._exchanging

    def of(self, instruction: Instruction, device: int) -> int | None:
        """The device at the other end of a message; None if the layer lies on no boundary."""
        kind, layer, _ = instruction
        place = mesh_coord(device, self._cut)
        if layer is None:
            return None
        if kind in _LOANS:
            return self._at(self._loans.get((layer, place.stage)), place)
        ends = self._ends.get(layer)
        if ends is None or place.stage not in ends:
            return None
        here, there = ends
        return self._at(there if here == place.stage else here, place)

    def lane(self, instruction: Instruction, device: int) -> str:
        """The kind of message, as its receiver's instruction; each kind keeps its own order.

        Outputs go onward and their gradients back, on lanes of their own: with two stages that
        interleave, both go from each device to the other.
        """
        kind, layer, _ = instruction
        if kind == "send" and layer is not None:
            return "onward" if self._ends[layer][0] == mesh_coord(device, self._cut).stage else "back"
        if kind == "receive" and layer is not None:
            return "onward" if self._ends[layer][1] == mesh_coord(device, self._cut).stage else "back"
        return {
            "send_tied_weights": "recv_tied_weights",
            "send_tied_grads": "accumulate_tied_grads",
        }.get(kind, kind)

    def _at(self, stage: int | None, place: MeshCoord) -> int | None:
        return None if stage is None else rank_of(place._replace(stage=stage), self._cut)
