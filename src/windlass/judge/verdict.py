"""The verdict: is a run as expected, slow, broken, or is too little known to say?"""

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from windlass.document import Document
from windlass.judge.bands import (
    Departure,
    constant_ratio,
    first_non_finite,
    leaves_own_band,
    leaves_peers,
    suspect_documents,
    wrong_target_loss,
)
from windlass.judge.change_points import BLOCK_STEPS, stall_share
from windlass.judge.evidence import Curve, Evidence
from windlass.judge.moderated_t import FEWEST_PEERS
from windlass.judge.slowdown import (
    Slowdown,
    after_warm_up,
    find_slowdown,
    longer_than,
    peer_test,
    percent,
)
from windlass.judge.stragglers import (
    Cause,
    Culprit,
    cpu_seconds,
    describe_rank,
    lateness,
)
from windlass.units import format_bytes, format_seconds

VerdictLevel = Literal["expected", "slow", "broken", "unknown"]
Quantity = Literal["loss", "gradient norm", "step time", "stalls", "state"]
"""What left its band."""

_LEAST: dict[str, float] = {"loss": 0.005, "gradient_norm": 0.1}
"""Smallest departure of a curve that counts, as a logarithm."""
_NAMES: dict[str, Quantity] = {"loss": "loss", "gradient_norm": "gradient norm"}
_STALLS = 0.025
"""Share of steps that stall which is worth a sentence."""
_SAME_FACTOR = 0.1
_CPU_SHARE = 0.5
"""A rank had too little of a core if less of its extra time is CPU time."""
_BUSY_CORES, _BUSY_DISK_BYTES = 0.25, 2e7
"""Load by other processes that is worth a sentence: a quarter of a core, 20 MB/s."""


class Verdict(Document):
    """What is to be thought of a run."""

    level: VerdictLevel
    sentences: tuple[str, ...]
    """The reasons, the most important first."""
    step: int = 0
    """The last step that was judged."""
    peers: int = 0
    """Earlier runs of the same graph, plan and machine that it was compared with."""
    quantity: Quantity | None = None
    since_step: int | None = None
    """The first step of the fault; None if it was there from the start, or there is none."""
    magnitude: float | None = None
    """How much longer a step takes, or by how much a curve left its band, as a share."""
    sigmas: float | None = None
    cause: Cause | None = None
    kind: str | None = None
    """Kind of instruction that takes longer."""
    ranks: tuple[int, ...] = ()
    """The slow rank, or the ranks at the ends of the slow link."""
    tier: str | None = None
    spike: tuple[int, int] | None = None
    """The first and the last step of a loss spike that is over."""
    documents: tuple[str, ...] = ()
    """Documents whose samples go with a high loss."""
    differences: tuple[str, ...] = ()
    """What was asked for otherwise than in the peers."""

    @property
    def headline(self) -> str:
        """`slow: a step takes 30 % longer than in its 14 peers`."""
        return f"{self.level}: {self.sentences[0]}"

    @property
    def is_alarm(self) -> bool:
        """Whether somebody should look."""
        return self.level in ("slow", "broken")

    def same_as(self, other: "Verdict | None") -> bool:
        """Whether another verdict says the same, with other numbers at most."""
        return other is not None and (
            (self.level, self.quantity, self.cause, self.ranks, self.tier)
            == (other.level, other.quantity, other.cause, other.ranks, other.tier)
        )


def judge(evidence: Evidence) -> Verdict:
    """The verdict on a run. It depends on nothing but the evidence."""
    steps = evidence.seconds.steps
    last = int(steps[-1]) if len(steps) else 0
    broken = _broken(evidence, last)
    slow = find_slowdown(evidence) if len(steps) >= BLOCK_STEPS else None
    if broken is not None:
        more = (slow.sentence,) if slow else ()
        return broken.model_copy(update={"sentences": broken.sentences + more})
    if slow is not None:
        return _slow(evidence, slow, last)
    if len(steps) < BLOCK_STEPS:
        count = f"only {len(steps)} step{'' if len(steps) == 1 else 's'}"
        return Verdict(level="unknown", sentences=(count,), step=last, peers=len(evidence.peers))
    known = len(evidence.peers)
    notes = (*_prediction_notes(evidence), *_notes(evidence))
    if known < FEWEST_PEERS:
        count = f"only {known} peer{'' if known == 1 else 's'}" if known else "no peers"
        return Verdict(level="unknown", sentences=(count, *notes), step=last, peers=known)
    test = peer_test(evidence)
    if test is None:
        return Verdict(level="unknown", sentences=("the steps took no time",), peers=known)
    sentence = (
        f"a step takes {longer_than(math.expm1(test.shift))} in its {known} peers, whose noise "
        f"is {percent(test.deviation)} ({test.sigmas:+.1f} sigma)"
    )
    return Verdict(
        level="expected", sentences=(sentence, *notes), step=last, peers=known,
        magnitude=math.expm1(test.shift), sigmas=test.sigmas,
    )  # fmt: skip


def _broken(evidence: Evidence, last: int) -> Verdict | None:
    """The verdict on a run that computes something wrong; None if it does not."""
    peers = len(evidence.peers)
    for name, quantity in _NAMES.items():
        curve = evidence.curves.get(name)
        if curve is not None and (step := first_non_finite(curve)) is not None:
            return Verdict(
                level="broken", sentences=(f"the {quantity} is not finite at step {step}",),
                step=last, peers=peers, quantity=quantity, since_step=step,
            )  # fmt: skip
    if evidence.state == "broken":
        reason = evidence.reason or "the run ended by an error"
        return Verdict(
            level="broken", sentences=(reason,), step=last, peers=peers, quantity="state"
        )
    departures = {name: found for name in _NAMES if (found := _departure(evidence, name))}
    if not departures:
        return None
    # A wrong gradient also changes the loss: whichever is further off is the first to look at.
    name = max(departures, key=lambda key: abs(departures[key].sigmas))
    found = departures[name]
    sentences = [_departure_sentence(other, departures[other]) for other in departures]
    sentences.sort(key=lambda sentence: not sentence.startswith(f"the {_NAMES[name]}"))
    documents = _suspects(evidence) if "loss" in departures else ()
    return Verdict(
        level="broken",
        sentences=(*sentences, *_causes(evidence, departures, documents)),
        step=last, peers=peers, quantity=_NAMES[name], since_step=found.step,
        magnitude=found.ratio - 1, sigmas=found.sigmas, documents=documents, spike=_spike(evidence),
        differences=evidence.differences,
    )  # fmt: skip


def _departure(evidence: Evidence, name: str) -> Departure | None:
    """How a curve leaves its band; None if it does not."""
    curve = evidence.curves.get(name)
    if curve is None:
        return None
    peers = _peer_curves(evidence, name)
    floor = wrong_target_loss(evidence.targets) if name == "loss" else 0.0
    if len(peers) >= FEWEST_PEERS and (
        found := leaves_peers(curve, peers, least=_LEAST[name], floor=floor)
    ):
        return found
    return leaves_own_band(curve, floor=floor) if name == "loss" else None


def _spike(evidence: Evidence) -> tuple[int, int] | None:
    """The steps of a loss that rose out of its own band and came back."""
    curve = evidence.curves.get("loss")
    floor = wrong_target_loss(evidence.targets)
    found = leaves_own_band(curve, floor=floor) if curve is not None else None
    if found is None or found.lasts or found.until is None:
        return None
    return found.step, found.until


def _departure_sentence(name: str, found: Departure) -> str:
    band = f"the band of its {found.peers} peers" if found.peers else "the band of its last steps"
    how = "and stays outside" if found.lasts else "for a while"
    return (
        f"the {_NAMES[name]} left {band} at step {found.step} {how}: it is {found.ratio:.3g} times "
        f"what they have ({found.sigmas:+.1f} sigma)"
    )


def _causes(
    evidence: Evidence, departures: dict[str, Departure], documents: tuple[str, ...]
) -> Iterator[str]:
    """What may be behind a wrong loss or gradient norm, a sentence each."""
    if norm := departures.get("gradient_norm"):
        for name, size in evidence.sizes.items():
            for ratio, word in ((norm.ratio, "a sum"), (1 / norm.ratio, "a mean of a mean")):
                if size > 1 and abs(ratio / size - 1) <= _SAME_FACTOR:
                    yield f"the factor is that of {name} ({size}): {word} in place of a mean"
    rate = evidence.curves.get("learning_rate")
    peers = _peer_curves(evidence, "learning_rate")
    if rate is not None and peers:
        factor = constant_ratio(rate, peers)
        if factor is not None and abs(factor - 1) > _SAME_FACTOR:
            yield f"the learning rate is {factor:.3g} times that of its peers"
    for difference in evidence.differences:
        yield f"other than in its peers: {difference}"
    if documents:
        yield f"the loss is high in steps with samples of {', '.join(f'`{d}`' for d in documents)}"


def _suspects(evidence: Evidence) -> tuple[str, ...]:
    if evidence.documents is None:
        return ()
    peers = _peer_curves(evidence, "loss")
    return suspect_documents(evidence.curves["loss"], peers, evidence.documents)


def _slow(evidence: Evidence, slow: Slowdown, last: int) -> Verdict:
    """The verdict on a run that takes too long."""
    culprit = slow.culprit
    since = f", since step {slow.since}" if slow.since is not None else ""
    sentences = [f"{slow.sentence}{since}"]
    if culprit is not None:
        sentences.append(_culprit_sentence(culprit, slow.steps, evidence))
    return Verdict(
        level="slow",
        sentences=(
            *sentences,
            *_core_notes(evidence, slow),
            *_load_notes(evidence, culprit),
            *_prediction_notes(evidence),
        ),
        step=last, peers=len(evidence.peers), quantity=slow.quantity, since_step=slow.since,
        magnitude=slow.magnitude, sigmas=slow.sigmas, differences=evidence.differences,
        cause=culprit.cause if culprit else None, kind=culprit.kind if culprit else None,
        ranks=culprit.ranks if culprit else (), tier=culprit.tier if culprit else None,
    )  # fmt: skip


def _culprit_sentence(culprit: Culprit, steps: range, evidence: Evidence) -> str:
    kind = f"`{culprit.kind}` takes {culprit.ratio:.2g} times as long"
    if culprit.cause == "rank":
        rank = culprit.ranks[0]
        name = describe_rank(rank, evidence.ranks[rank].coord)
        late = lateness(evidence, steps, rank)
        how = f"arrives {format_seconds(late)} late at every reduction" if late > 0 else "is slow"
        return f"{name} {how}: compute, not link; {kind}"
    if culprit.cause == "link":
        ends = " and ".join(map(str, culprit.ranks))
        if len(culprit.ranks) > 2:
            ends = ", ".join(map(str, culprit.ranks))
        return f"the link between ranks {ends} is slow: link, not compute; {kind}"
    if culprit.cause == "tier":
        return f"transfers with tier `{culprit.tier}` are slow; {kind}"
    who = "all ranks compute" if len(evidence.ranks) > 1 else "this device computes"
    return f"{who} longer; {kind}"


def _core_notes(evidence: Evidence, slow: Slowdown) -> Iterator[str]:
    """Whether a slow rank computed more, or had less of a core."""
    culprit = slow.culprit
    if culprit is None or culprit.cause not in ("rank", "host"):
        return
    rank = culprit.ranks[0]
    after = cpu_seconds(evidence.ranks[rank], slow.steps)
    known = [peer.cpu_seconds[rank] for peer in evidence.peers if rank in peer.cpu_seconds]
    if slow.before is not None:
        before = cpu_seconds(evidence.ranks[rank], slow.before)
    else:
        before = float(np.median(known)) if known else None
    if before is None or after is None:
        return
    if after - before < _CPU_SHARE * culprit.seconds:
        yield (
            f"it computes no more than before, in {format_seconds(after)} of CPU time a step: "
            "other processes have its cores"
        )
    else:
        yield f"it computes more: {format_seconds(after - before)} of CPU time a step"


def _load_notes(evidence: Evidence, culprit: Culprit | None) -> Iterator[str]:
    """What other processes do on the hosts of the slow ranks."""
    ranks = culprit.ranks if culprit else tuple(evidence.load)
    cores = [load.cores for r in ranks if (load := evidence.load.get(r)) and load.cores]
    disks = [
        load.disk_bytes_per_second
        for rank in ranks
        if (load := evidence.load.get(rank)) and load.disk_bytes_per_second
    ]
    if cores and max(cores) >= _BUSY_CORES:
        yield f"other processes keep {max(cores):.1f} cores of that host busy"
    if disks and max(disks) >= _BUSY_DISK_BYTES:
        yield f"other processes move {format_bytes(round(max(disks)))}/s to and from its disk"


def _notes(evidence: Evidence) -> Iterator[str]:
    share = stall_share(after_warm_up(evidence.seconds).values)
    if share >= _STALLS:
        yield f"{percent(share)} of the steps stall for more than twice the usual time"


def _prediction_notes(evidence: Evidence) -> Iterator[str]:
    predicted = evidence.predicted
    if predicted is None or predicted.seconds <= 0 or not len(evidence.seconds.values):
        return
    measured = float(np.median(evidence.seconds.values))
    inside = "within" if predicted.low <= measured <= predicted.high else "outside"
    yield (
        f"a step takes {measured / predicted.seconds:.2f} times what was predicted, {inside} the "
        "prediction's 80 % interval"
    )


def _peer_curves(evidence: Evidence, name: str) -> list[Curve]:
    return [peer.curves[name] for peer in evidence.peers if peer.comparable and name in peer.curves]
