"""ZeRO sharding: which shards each replica stores, and the replica groups that communicate.

A plan has two sharding degrees: `rts` replicas share one copy of the parameters (ZeRO-3, FSDP) and
`rts'` replicas one copy of the optimizer state (ZeRO-1), where rts divides rts' and rts' divides
the data-parallel degree r. A layer's own parameters are flattened, padded to a multiple of rts' and
split into rts' equal parts. Replica j stores optimizer shard `j mod rts'`, and the parameter shard
that contains it, `(j mod rts') // q` with `q = rts' / rts`. So a device updates a part of the
parameters that it stores, and needs no others for that. Frozen parameters, which nobody updates,
are flattened by themselves and split into rts equal parts.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054; two degrees as in the IPU's replicated
tensor sharding.
"""

from windlass.schema import Plan, ShardingDegrees

_Group = tuple[int, ...]


def expert_sharding(plan: Plan) -> Plan:
    """The plan as the weights of experts see it: as if there were no others.

    Of r replicas `r / e` hold the same experts, and share them. A group of rts' adjacent replicas
    has `rts' / e` of these, or fewer than one, so experts are sharded over that many: each rank
    then stores `1 / max(e, rts')` of their state.
    """
    parallel, sharding, degree = plan.parallel, plan.sharding, plan.parallel.expert_degree
    alone = {"data": max(1, parallel.replicas // degree), "context": None, "expert": None}
    return plan.model_copy(
        update={
            "parallel": parallel.model_copy(update=alone),
            "sharding": ShardingDegrees.model_construct(
                parameters=max(1, sharding.parameters // degree),
                optimizer=max(1, sharding.optimizer // degree),
                reshard=sharding.reshard,
            ),
        }
    )


def padded_elements(elements: int, plan: Plan) -> int:
    """Elements of a layer's flattened trained parameters, padded to a multiple of rts'."""
    return -(-elements // plan.sharding.optimizer) * plan.sharding.optimizer


def padded_frozen_elements(elements: int, plan: Plan) -> int:
    """Elements of a layer's flattened frozen parameters, padded to a multiple of rts."""
    return -(-elements // plan.sharding.parameters) * plan.sharding.parameters


def updates_per_shard(plan: Plan) -> int:
    """Number q of optimizer shards in one parameter shard: `rts' / rts`."""
    return plan.sharding.optimizer // plan.sharding.parameters


def optimizer_shard_index(data_rank: int, plan: Plan) -> int:
    """Index of the optimizer shard that a replica stores."""
    return data_rank % plan.sharding.optimizer


def parameter_shard_index(data_rank: int, plan: Plan) -> int:
    """Index of the parameter shard that a replica stores."""
    return optimizer_shard_index(data_rank, plan) // updates_per_shard(plan)


def parameter_gather_group(data_rank: int, plan: Plan) -> _Group:
    """The rts replicas that all-gather full parameters, in the order of their shards."""
    q = updates_per_shard(plan)
    first = _sharding_group_start(data_rank, plan) + data_rank % q
    return tuple(first + shard * q for shard in range(plan.sharding.parameters))


def update_gather_group(data_rank: int, plan: Plan) -> _Group:
    """The q replicas that all-gather one parameter shard after an update, in shard order."""
    first = _sharding_group_start(data_rank, plan)
    first += parameter_shard_index(data_rank, plan) * updates_per_shard(plan)
    return tuple(range(first, first + updates_per_shard(plan)))


def gradient_scatter_group(data_rank: int, plan: Plan) -> _Group:
    """The rts' replicas that reduce-scatter gradients, in the order of their shards."""
    return adjacent_replicas(data_rank, plan.sharding.optimizer)


def gradient_reduce_group(data_rank: int, plan: Plan) -> _Group:
    """The r / rts' replicas that store the same optimizer shard and all-reduce its gradient."""
    shard, degree = optimizer_shard_index(data_rank, plan), plan.sharding.optimizer
    return tuple(range(shard, plan.parallel.replicas, degree))


def adjacent_replicas(data_rank: int, degree: int) -> _Group:
    """The block of so many adjacent replicas that has this one."""
    first = data_rank // degree * degree
    return tuple(range(first, first + degree))


def _sharding_group_start(data_rank: int, plan: Plan) -> int:
    """The first of the rts' replicas that share one copy of the optimizer state."""
    return data_rank - optimizer_shard_index(data_rank, plan)
