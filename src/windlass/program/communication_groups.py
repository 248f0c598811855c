"""Communication groups: the ranks that each instruction of a device communicates with."""

from windlass.program.device_mesh import MeshCoord, mesh_coord, rank_of
from windlass.program.instruction import COLLECTIVE_KINDS, Instruction, InstructionKind
from windlass.program.tensor_parallel import LAYER_PASSES, passes_with_collectives
from windlass.program.tied_weights import tied_across_stages
from windlass.program.zero_sharding import parameter_gather_group, update_gather_group
from windlass.schema import Graph, Plan

_TIED_KINDS: tuple[InstructionKind, ...] = (
    "send_tied_weights",
    "accumulate_tied_grads",
    "recv_tied_weights",
    "send_tied_grads",
)


def communication_group(instruction: Instruction, device: int, plan: Plan) -> tuple[int, ...]:
    """The ranks of a collective instruction, in the order of their parts of the full buffer.

    A pass has the tensor-parallel ranks of one stage and replica. `reduce_grads` has all ranks of a
    stage: replicated parameters are summed over tensor-parallel ranks, then all over replicas.
    `unshard_weights` has the replicas that share the weights, `all_gather_params` those that
    updated parts of one shard. All other collectives have every rank of the plan.
    """
    coord = mesh_coord(device, plan.parallel)
    if instruction.kind in LAYER_PASSES:
        ranks = range(plan.parallel.tensor)
        return tuple(rank_of(coord._replace(tensor_rank=rank), plan.parallel) for rank in ranks)
    if instruction.kind == "reduce_grads":
        first = rank_of(coord._replace(tensor_rank=0, data_rank=0), plan.parallel)
        return tuple(range(first, first + plan.parallel.replicas * plan.parallel.tensor))
    if instruction.kind == "unshard_weights":
        replicas: tuple[int, ...] = parameter_gather_group(coord.data_rank, plan)
    elif instruction.kind == "all_gather_params":
        replicas = update_gather_group(coord.data_rank, plan)
    else:
        return tuple(range(plan.parallel.devices))
    return tuple(rank_of(coord._replace(data_rank=replica), plan.parallel) for replica in replicas)


class PeerMap:
    """The rank at the other end of each message of a plan, and which instructions are collective.

    Args:
        plan: the plan.
        graph: the plan's full graph.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._parallel = plan.parallel
        self._collective_passes = passes_with_collectives(plan, graph)
        stages = plan.parallel.pipeline
        self._boundaries = {
            chunk.end_layer - 1: (index % stages, (index + 1) % stages)
            for index, chunk in enumerate(plan.stages[:-1])
        }
        self._tied_peers = {
            (tied.user_layer, stage): (
                tied.user_stage if stage == tied.owner_stage else tied.owner_stage
            )
            for tied in tied_across_stages(plan, graph)
            for stage in (tied.owner_stage, tied.user_stage)
        }

    def is_collective(self, instruction: Instruction) -> bool:
        """Whether an instruction waits for every device of its group."""
        kind, layer, _ = instruction
        return kind in COLLECTIVE_KINDS or (kind, layer) in self._collective_passes

    def peer_of(self, instruction: Instruction, device: int) -> int | None:
        """The rank at the other end of a message; None if the layer is at no stage boundary."""
        kind, layer, _ = instruction
        coord = mesh_coord(device, self._parallel)
        if layer is None:
            return None
        if kind in _TIED_KINDS:
            return self._same_rank_on(self._tied_peers.get((layer, coord.stage)), coord)
        boundary = self._boundaries.get(layer)
        if boundary is None or coord.stage not in boundary:
            return None
        before, after = boundary
        return self._same_rank_on(after if before == coord.stage else before, coord)

    def channel(self, instruction: Instruction, device: int) -> str:
        """The ordered channel of a message, named after its receiving instruction.

        Activations (`onward`) and their gradients (`back`) have separate channels: with two
        interleaved stages, both kinds go from each device to the other.
        """
        kind, layer, _ = instruction
        if kind in ("send", "receive") and layer is not None:
            source = self._boundaries[layer][0 if kind == "send" else 1]
            return "onward" if source == mesh_coord(device, self._parallel).stage else "back"
        return {
            "send_tied_weights": "recv_tied_weights",
            "send_tied_grads": "accumulate_tied_grads",
        }.get(kind, kind)

    def _same_rank_on(self, stage: int | None, coord: MeshCoord) -> int | None:
        """The rank with the same tensor- and data-parallel rank on another stage."""
        return None if stage is None else rank_of(coord._replace(stage=stage), self._parallel)
