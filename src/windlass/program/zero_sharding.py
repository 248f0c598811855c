"""Shards: which part of a layer each replica is home to, and with whom it puts parts together.

Replicated tensor sharding has two degrees: rts replicas share one copy of the weights and rts' one
copy of the optimizer state, where rts divides rts' and rts' divides r. A layer's own weights are
laid flat, padded to a multiple of rts', and cut in rts' equal parts. Replica j is home to optimizer
shard `j mod rts'`, and to the weight shard that this one is a part of, `(j mod rts') // q` with
`q = rts' / rts`. So a device updates a part of the weights it holds, and needs no other for it.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054; two degrees as in the IPU's replicated
tensor sharding.
"""

from windlass.schema.plan import Plan

_Group = tuple[int, ...]


def padded(elements: int, plan: Plan) -> int:
    """Elements of a flat layer: the next multiple of rts'."""
    return -(-elements // plan.sharding.optimizer) * plan.sharding.optimizer


def parts(plan: Plan) -> int:
    """q: optimizer shards in one weight shard."""
    return plan.sharding.optimizer // plan.sharding.parameters


def optimizer_shard(replica: int, plan: Plan) -> int:
    """The index of the optimizer shard that a replica is home to."""
    return replica % plan.sharding.optimizer


def weight_shard(replica: int, plan: Plan) -> int:
    """The index of the weight shard that a replica is home to."""
    return optimizer_shard(replica, plan) // parts(plan)


def gathering(replica: int, plan: Plan) -> _Group:
    """The rts replicas whose weight shards make a replica's whole weights, in that order."""
    q = parts(plan)
    first = _block(replica, plan) + replica % q
    return tuple(first + shard * q for shard in range(plan.sharding.parameters))


def spreading(replica: int, plan: Plan) -> _Group:
    """The q replicas that have updated the parts of one weight shard, in the order of the parts."""
    first = _block(replica, plan) + weight_shard(replica, plan) * parts(plan)
    return tuple(range(first, first + parts(plan)))


def scattering(replica: int, plan: Plan) -> _Group:
    """The rts' replicas that a gradient's sum is scattered over, in the order of the shards."""
    first = _block(replica, plan)
    return tuple(range(first, first + plan.sharding.optimizer))


def agreeing(replica: int, plan: Plan) -> _Group:
    """The r / rts' replicas with the same optimizer shard, whose gradient shards are summed."""
    shard, degree = optimizer_shard(replica, plan), plan.sharding.optimizer
    return tuple(range(shard, plan.parallel.data, degree))


def _block(replica: int, plan: Plan) -> int:
    """The first of the rts' replicas that share one copy of the optimizer state."""
    return replica - optimizer_shard(replica, plan)
