"""Makes the evidence of runs of two stages with two replicas each: healthy, or with one fault."""

from collections.abc import Callable, Mapping

import numpy as np

from windlass.judge import Curve, Evidence, Peer, RankTimes
from windlass.program import MeshCoord

KINDS = {"forward": 0.03, "backward": 0.06, "receive": 0.004, "reduce_grads": 0.006}
NOISE, LOSS_NOISE = 0.01, 0.004
Change = Callable[[int, dict[str, np.ndarray]], None]
"""Changes the seconds by kind of one rank."""


def steps_of(count: int) -> np.ndarray:
    return np.arange(1, count + 1)


def rank_times(rng: np.random.Generator, count: int, change: Change | None) -> dict[int, RankTimes]:
    """A run between whose steps nothing is correlated but its own level."""
    level = np.exp(rng.normal(0, NOISE))
    ranks = {}
    for rank in range(4):
        kinds = {
            kind: seconds * level * np.exp(rng.normal(0, 0.03, count))
            for kind, seconds in KINDS.items()
        }
        if change is not None:
            change(rank, kinds)
        ranks[rank] = RankTimes(MeshCoord(rank // 2, 0, rank % 2), steps_of(count), kinds)
    return ranks


def loss_curve(rng: np.random.Generator, count: int) -> Curve:
    steps = steps_of(count)
    middle = 4 + 4 * np.exp(-steps / 60)
    return Curve(steps, middle * np.exp(rng.normal(0, LOSS_NOISE) + rng.normal(0, 0.02, count)))


def norm_curve(rng: np.random.Generator, count: int) -> Curve:
    steps = steps_of(count)
    return Curve(steps, (0.5 + 2 / steps) * np.exp(rng.normal(0, 0.1, count)))


def peer(seed: int, count: int = 120) -> Peer:
    rng = np.random.default_rng(seed)
    ranks = rank_times(rng, count, None)
    return Peer(
        seconds=float(np.median(total(ranks))),
        curves={"loss": loss_curve(rng, count), "gradient_norm": norm_curve(rng, count),
                "learning_rate": Curve(steps_of(count), np.full(count, 1e-3))},
        stalls=0.0,
        kinds={rank: {kind: float(np.median(v)) for kind, v in one.kinds.items()}
               for rank, one in ranks.items()},
    )  # fmt: skip


def total(ranks: Mapping[int, RankTimes]) -> np.ndarray:
    return np.sum(list(ranks[0].kinds.values()), axis=0)


def evidence(
    *,
    peers: int = 12,
    count: int = 120,
    change: Change | None = None,
    seed: int = 1000,
    curves: Callable[[dict[str, Curve]], None] | None = None,
    **more: object,
) -> Evidence:
    """The evidence on a run with so many peers; `change` and `curves` put a fault into it."""
    rng = np.random.default_rng(seed)
    ranks = rank_times(rng, count, change)
    own = {
        "loss": loss_curve(rng, count),
        "gradient_norm": norm_curve(rng, count),
        "learning_rate": Curve(steps_of(count), np.full(count, 1e-3)),
    }
    if curves is not None:
        curves(own)
    fields = {
        "state": "finished",
        "seconds": Curve(steps_of(count), total(ranks)),
        "curves": own,
        "ranks": ranks,
        "peers": tuple(peer(number, count) for number in range(peers)),
        "sizes": {"the data-parallel ranks": 2},
    }
    return Evidence(**(fields | more))
