"""Evidence: the measurements of a run and of its peers that a verdict follows from, as arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.judge.moderated_t import DEFAULT_PRIOR, NoisePrior
from windlass.program import MeshCoord
from windlass.schema import RunState

Values = npt.NDArray[np.float64]
"""`Float[step]`."""
KindSeconds = Mapping[str, float]
"""Seconds of a step by kind of instruction."""


class Curve(NamedTuple):
    """One number over the steps of a run."""

    steps: npt.NDArray[np.int64]
    """`Int[step]`, ascending."""
    values: Values


class RankTimes(NamedTuple):
    """What one rank measured."""

    coord: MeshCoord
    steps: npt.NDArray[np.int64]
    kinds: Mapping[str, Values]
    """Seconds of each step by kind of instruction."""
    arrivals: Mapping[str, Values] = MappingProxyType({})
    """When the rank came to kinds that wait for others, in seconds after each step's start."""
    cpu_seconds: Values | None = None
    """CPU time of the process in each step; None if it was not measured."""


class HostLoad(NamedTuple):
    """What other processes than the run's ranks did to the host of a rank, on average."""

    cores: float | None = None
    """Cores that they kept busy; None if it was not measured."""
    disk_bytes_per_second: float | None = None
    """What they read and wrote; None if it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peer:
    """An earlier run of the same graph, plan and machine."""

    seconds: float
    """Median step time."""
    comparable: bool = True
    """Whether it asked for as many steps, so that curves of loss compare step by step."""
    curves: Mapping[str, Curve] = field(default_factory=lambda: MappingProxyType({}))
    """Its `loss`, `gradient_norm` and `learning_rate`; empty if they were not read."""
    stalls: float | None = None
    """Share of steps beyond twice their block's median; None if it was not read."""
    kinds: Mapping[int, KindSeconds] = field(default_factory=lambda: MappingProxyType({}))
    """Median seconds by kind of each rank; empty if they were not read."""
    cpu_seconds: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Median CPU time of a step of each rank; empty if it was not read."""


class PredictedTime(NamedTuple):
    """The prediction of the step time, in seconds."""

    seconds: float
    low: float
    """Lower end of the 80 % interval."""
    high: float


class DocumentCounts(NamedTuple):
    """How many samples of each step came from which document."""

    steps: npt.NDArray[np.int64]
    """`Int[step]`."""
    names: tuple[str, ...]
    """Documents, and folders of documents, by name."""
    counts: npt.NDArray[np.float64]
    """`Float[step name]`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """All that the verdict on a run follows from."""

    state: RunState
    reason: str = ""
    """Why the run ended, if it ended badly."""
    seconds: Curve
    """Step time."""
    curves: Mapping[str, Curve]
    """`loss`, `gradient_norm` and `learning_rate`."""
    ranks: Mapping[int, RankTimes]
    peers: tuple[Peer, ...] = ()
    prior: NoisePrior = DEFAULT_PRIOR
    predicted: PredictedTime | None = None
    residuals: tuple[float, ...] = ()
    """Logarithms of measured over predicted step time of other plans in the record: how far
    predictions are off there."""
    tiers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The offload tier that a kind of instruction transfers to or from; other kinds do not."""
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Numbers that a gradient can be wrong by a factor of, such as the data-parallel ranks."""
    differences: tuple[str, ...] = ()
    """What the run was asked for otherwise than its peers, a clause each."""
    load: Mapping[int, HostLoad] = field(default_factory=lambda: MappingProxyType({}))
    """By rank."""
    targets: int | None = None
    """Targets that the loss of a step is a mean over, at most; None if it is not known."""
    documents: DocumentCounts | None = None
    """Only needed once a loss is known to be wrong; None if they are not known."""
