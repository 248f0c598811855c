"""Turns: plans for several devices whose layers come into the near tier in phases.

A rough law orders them (`_Rough`); the clock weighs those that it puts first, so that what is
chosen is told by its program like any other plan. The law is no bound: a plan that it puts too far
back is not found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise, product

from windlass.cost.closed_layers import Block, Chain, Setting
from windlass.program.far import far_bytes
from windlass.program.layout import layers_of, place_of
from windlass.program.legal import faults
from windlass.program.lower import lower
from windlass.program.occupancy import occupancy
from windlass.program.sizes import sizes_of
from windlass.program.values import STAGING_BYTES
from windlass.search.field import Field
from windlass.spec.machine import Tier
from windlass.spec.plan import Batch, Cut, Home, Plan, Sharding, Stage

_PHASES = (2, 3, 4, 6, 8, 12, 24, 48, 96)
"""Phases of a stage that are tried where the request leaves them open."""
_FEW = 3
"""Micro-batches of a short program; all beyond them only leave their outputs."""
_LOOKED_AT = 120
"""Plans whose short programs are lowered to tell their memory."""
_TRIED = 2
"""Numbers of replicas that share one copy: the most, and the next fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rough:
    """One plan in phases, by what tells it apart, and what it takes at a rough guess."""

    setting: Setting
    pipeline: int
    phases: int
    micros: int
    shards: int
    away: bool
    """Whether outputs go home as well."""
    seconds: float
    near_bytes: float


def phased_plans(field: Field, near_bytes: float, count: int) -> tuple[Plan, ...]:
    """Legal plans in phases, those that are likely to fit and to be fast first.

    Args:
        field: what is open; `request.phases` pins the phases of a stage.
        near_bytes: of the near tier.
        count: plans that are wanted at most.
    """
    machine = field.machine
    tiers = [tier for tier in machine.device.tiers[1:] if tier.read and tier.write]
    if not tiers:
        return ()
    chain = Chain(field.base, field.graph, machine)
    guesses = list(_guesses(field, chain, tiers[0]))
    fitting = [each for each in guesses if each.near_bytes <= near_bytes]
    nearest = sorted(guesses, key=lambda each: each.near_bytes)[:count]
    ordered = sorted(fitting, key=lambda each: each.seconds) or nearest
    able = islice(_legal(field, ordered, tiers), _LOOKED_AT)
    found = [(_near_bytes(plan, field), plan) for plan in able]
    fits = [plan for nbytes, plan in found if nbytes <= near_bytes]
    return tuple(fits[:count]) or tuple(plan for _, plan in sorted(found, key=_bytes)[:1])


def _near_bytes(plan: Plan, field: Field) -> float:
    """The near tier at its fullest, by a program of few micro-batches.

    Of the others only outputs stay, and those only where they do not go home.
    """
    batch, held = plan.batch, field.machine.device.process_bytes(compiled=plan.compile)
    few = min(_FEW, batch.accumulation)
    short = plan.model_copy(update={"batch": batch.model_copy(update={"accumulation": few})})
    fullest = 0.0
    for program in lower(short, field.graph)[:: plan.cut.tensor * plan.cut.replicas]:
        full = occupancy(program, short, field.graph, runtime_bytes=held)
        stage = place_of(program.device, plan.cut).stage
        sizes = sizes_of(short, field.graph)
        left = 0 if plan.far("activations") else batch.accumulation - few
        outputs = sum(sizes[layer].output for layer in layers_of(plan, stage))
        fullest = max(fullest, full.peak_bytes + left * outputs)
    return fullest


def _bytes(found: tuple[float, Plan]) -> float:
    return found[0]


def _legal(field: Field, ordered: list[_Rough], tiers: list[Tier]) -> Iterator[Plan]:
    """The plans of guesses, at home in the nearest tier that holds them."""
    for guess in ordered:
        for tier in tiers:
            plan = _plan(field, guess, tier.name)
            homes = [
                sum(classes.values())
                for stage in range(plan.cut.pipeline)
                for classes in far_bytes(plan, field.graph, stage).values()
            ]
            if max(homes) <= tier.capacity_bytes:
                if not faults(plan, field.graph, field.machine):
                    yield plan
                break


def _guesses(field: Field, chain: Chain, tier: Tier) -> Iterator[_Rough]:
    pin = field.request.phases
    precisions = field.precisions if len(field.precisions) == 1 else ("bfloat16",)
    for tensor, replicas, precision in product(field.tensors, field.replicas, precisions):
        for micros in field.micros:
            micro = field.micro(micros, replicas)
            if micro is None or tensor * replicas > field.machine.devices:
                continue
            for compiled in sorted({mode for mode, _ in field.modes("1f1b", precision)}):
                setting = Setting(tensor, precision, compiled, micro, micros > 1, False, replicas)
                sums = _Sums(field, chain, setting)
                for pipeline in field.pipelines:
                    if pipeline * tensor * replicas <= field.machine.devices:
                        most = min(b - a for a, b in pairwise(field.ends(pipeline)))
                        able = [n for n in (_PHASES if pin is None else (pin,)) if n <= most]
                        yield from sums.guesses(pipeline, able, micros, tier)


class _Sums:
    """What one setting takes over the whole chain, and guesses from it."""

    def __init__(self, field: Field, chain: Chain, setting: Setting) -> None:
        numbers = chain.passes(setting)
        self._setting = setting
        self._held = chain.machine.device.process_bytes(compiled=setting.compiled) + STAGING_BYTES
        pairs = field.pairs(setting.replicas)
        self._shards = sorted({min(pair) for pair in pairs if pair[0] == pair[1]})[-_TRIED:]
        self._states = []
        for shards in self._shards:
            block = Block(
                setting.tensor, setting.precision, setting.sums, setting.replicas,
                ((shards, shards),),
            )  # fmt: skip
            states = chain.states(block)
            exchanged = float((2 * states.gather + states.reduce).sum())
            self._states.append((shards, float(states.held.sum()), exchanged))
        self._weights = float(numbers.weights.sum())
        self._gradients = float(numbers.gradients.sum())
        again = numbers.forward + numbers.backward + numbers.sum_later
        self._computing = float((numbers.forward + again).sum())
        self._outputs, self._output = float(numbers.output.sum()), float(numbers.output.max())
        self._largest = float((numbers.weights + numbers.gradients).max())
        self._working = float((numbers.backward_peak + numbers.kept).max())

    def guesses(
        self, pipeline: int, phases: list[int], micros: int, tier: Tier
    ) -> Iterator[_Rough]:
        """Guesses of one pipeline, in any of some numbers of phases."""
        for (shards, held, exchanged), count, away in product(self._states, phases, (False, True)):
            seconds, near = self._taken(pipeline, count, micros, shards, held, tier, away=away)
            yield _Rough(
                setting=self._setting, pipeline=pipeline, phases=count, micros=micros,
                shards=shards, away=away, seconds=seconds + exchanged / pipeline, near_bytes=near,
            )  # fmt: skip

    def _taken(
        self,
        pipeline: int,
        count: int,
        micros: int,
        shards: int,
        held: float,
        tier: Tier,
        *,
        away: bool,
    ) -> tuple[float, float]:
        """Computing beside moving; and what two phases and all that waits between layers take.

        With p stages of n phases a stage waits until the one before it is through all phases but
        the last, so that computing takes about `1 + (p - 1) (n - 1) / n` times as long.
        """
        weights, outputs = self._weights / pipeline, self._outputs / pipeline * micros
        waits = 1 + (pipeline - 1) * (count - 1) / count
        computing = self._computing / pipeline * micros * waits
        state = held / pipeline - weights / shards
        moved = weights / shards + state + (outputs if away else 0.0)
        phase = weights / count
        near = self._held + max(phase + 2 * phase / shards, self._largest) + self._working
        near += self._gradients / pipeline / count + (2 * self._output if away else outputs)
        return max(computing, tier.moving_seconds(moved, moved)), near


def _plan(field: Field, guess: _Rough, tier: str) -> Plan:
    setting, ends = guess.setting, field.ends(guess.pipeline)
    # The last phase of all goes back at once; that of another stage would keep all micro-batches.
    recompute = field.request.recompute or ("layer" if guess.pipeline > 1 else "none")
    home = Home(weights=tier, gradients=tier, optimizer=tier)
    if guess.away:
        home = home.model_copy(update={"activations": tier})
    return field.base.model_copy(
        update={
            "precision": setting.precision,
            "compile": setting.compiled,
            "cut": Cut(pipeline=guess.pipeline, tensor=setting.tensor, replicas=setting.replicas),
            "sharding": Sharding(weights=guess.shards, optimizer=guess.shards),
            "home": home,
            "batch": Batch(sequence=field.sequence, micro=setting.micro, accumulation=guess.micros),
            "stages": tuple(
                Stage(phases=tuple(even(first, last, guess.phases)), recompute=recompute)
                for first, last in pairwise(ends)
            ),
        }
    )


def even(first: int, last: int, count: int) -> Iterator[tuple[int, int]]:
    """So many ranges of layers from `first` up to `last`, as even as can be."""
    count = min(count, last - first)
    yield from pairwise(first + (last - first) * at // count for at in range(count + 1))
