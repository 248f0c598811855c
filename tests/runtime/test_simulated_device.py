"""Training on the simulated accelerator, against the same run with all work done at once.

An accelerator adds some numbers in another order than a CPU, so a run on the CPU is equal to a
tolerance only; whatever is put off, offloaded or run in other streams must not change a bit.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from simulated_device import AT_ONCE, SCHEDULES, Schedule, SimulatedDevice, Site, callers
from windlass.data.batches import Batches
from windlass.errors import WindlassError
from windlass.models.layer_stack import LayerStack
from windlass.program import BOUNCE_BYTES
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import checkpoint_folders
from windlass.runtime.checkpoint.safetensors_io import HostStaging
from windlass.runtime.offload.backing_store import BounceBuffer, BouncedFile
from windlass.runtime.offload.direct_io import DirectFile, round_up_to_page
from windlass.runtime.offload.transfer_queue import TransferHandle, TransferQueue
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.graph import Graph
from windlass.schema.plan import Batch, Offload, Plan, Stage
from windlass.schema.run_record import Step
from windlass.schema.train_request import TrainSettings
from windlass.torch_ext import Device, device_for

SHAPE = {"layers": 2, "width": 16, "heads": 2, "sequence": 8, "dropout": 0.1}
PHASES = {1: ((0, 4),), 3: ((0, 1), (1, 2), (2, 4)), 4: ((0, 1), (1, 2), (2, 3), (3, 4))}
"""Layers of each phase, by number of phases: embedding, two blocks and head."""

ORDER_OF_SUMS = 1e-6
"""Largest difference of weights, all below 1, after three steps whose norms and embedding gradients
were summed in another order."""

MANY = 1000
"""Operations of a run, at least: one that puts none off would prove nothing."""

SEEDS = 25
"""Seeds of the random schedule in the slow test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan that overlaps something."""

    phases: int = 1
    offload: Offload = field(default_factory=Offload)
    precision: str = "float32"
    recompute: str = "none"
    clips: bool = True

    @property
    def in_memory(self) -> "Case":
        """The same arithmetic with everything in device memory."""
        return Case(precision=self.precision, clips=self.clips)


def _offload(tier: str, *, activations: bool = False) -> Offload:
    kept = {"activations": tier} if activations else {}
    return Offload(parameters=tier, gradients=tier, optimizer=tier, **kept)


CASES = {
    "checkpoints": Case(),
    "optimizer on host": Case(offload=Offload(optimizer="host")),
    "all on host": Case(
        phases=3, offload=_offload("host", activations=True), precision="bfloat16",
        recompute="full",
    ),
    "all on disk": Case(phases=3, offload=_offload("disk", activations=True), recompute="full"),
    "on disk without clipping": Case(phases=4, offload=_offload("disk"), clips=False),
}  # fmt: skip


class Result(NamedTuple):
    """What a run leaves."""

    losses: list[float]
    held_out: list[float | None]
    tensors: dict[str, torch.Tensor]
    """All tensors of both checkpoints."""

    def equals(self, other: "Result") -> bool:
        """Whether all is the same bit for bit."""
        return (
            self.losses == other.losses
            and self.held_out == other.held_out
            and self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(self.tensors[name], other.tensors[name]) for name in self.tensors)
        )


class Runs:
    """Trains three steps; updates are put off into the second and the third, and both are saved.

    Args:
        stack: makes the model.
        graph: its graph.
        batches: its data.
        folder: of all runs.
    """

    def __init__(
        self, stack: Callable[[], LayerStack], graph: Graph, batches: Batches, folder: Path
    ) -> None:
        self._stack, self._graph, self._batches, self._folder = stack, graph, batches, folder
        self._at_once: dict[Case, Result] = {}
        self._sites: dict[str, list[Site]] = {}

    def steps(self, case: Case, device: Device, folder: Path) -> Generator[Step]:
        """The steps of a run, which leaves its checkpoints in a folder."""
        plan = Plan(
            graph=self._graph.label, machine="here@000000000000", precision=case.precision,
            clip=case.clips, offload=case.offload,
            batch=Batch(sequence=8, micro=2, accumulation=2),
            stages=(Stage(phases=PHASES[case.phases], recompute=case.recompute),),
        )  # fmt: skip
        settings = TrainSettings(
            steps=3, batch=4, sequence=8, learning_rate=1e-2, warmup=0.4, epsilon=1e-4, seed=7,
            clip=0.5 if case.clips else None, save_every=2, evaluate_every=3, evaluate_sequences=4,
        )  # fmt: skip
        context = RankContext(
            plan=plan, stack=self._stack(), program=lower(plan, self._graph)[0],
            settings=settings, checkpoints=folder / "checkpoints", device=device,
        )  # fmt: skip
        return train_loop(context, self._batches)

    def __call__(self, case: Case, device: Device) -> Result:
        """What a run on a device leaves."""
        folder = Path(mkdtemp(dir=self._folder))
        steps = list(self.steps(case, device, folder))
        tensors = {
            f"{file.parent.name}/{name}": tensor
            for checkpoint in checkpoint_folders(folder / "checkpoints")
            for file in sorted(checkpoint.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
            if not name.startswith("zeros/")
        }
        shutil.rmtree(folder)
        losses, held_out = [s.loss for s in steps], [s.held_out_loss for s in steps]
        return Result(losses, held_out, tensors)

    def at_once(self, case: Case) -> Result:
        """The run whose bits all others must have: in device memory, all work done at once."""
        if case.in_memory not in self._at_once:
            with SimulatedDevice(AT_ONCE) as device:
                self._at_once[case.in_memory] = self(case.in_memory, device)
        return self._at_once[case.in_memory]

    def sites(self, name: str) -> list[Site]:
        """All that waits, holds or keeps in the run of a case."""
        if name not in self._sites:
            kept = KeptTensors(frozenset())
            with kept, SimulatedDevice(SCHEDULES[0]) as device:
                self(CASES[name], device)
            self._sites[name] = sorted({*device.simulation.sites, *kept.sites})
        return self._sites[name]


@pytest.fixture(scope="module")
def run(
    gpt: Callable[..., LayerStack],
    graph_of: Callable[..., Graph],
    batches: Callable[..., Batches],
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """Runs of a tiny GPT."""
    stack = partial(gpt, device="meta", **SHAPE)
    folder = tmp_path_factory.mktemp("simulated")
    return Runs(stack, graph_of(**SHAPE), batches(batch=4, sequence=8), folder)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_run_with_all_work_done_at_once_is_that_of_a_cpu(run: Runs, precision: str):
    case = Case(precision=precision)
    simulated, plain = run.at_once(case), run(case, device_for("cpu"))
    assert simulated.losses == pytest.approx(plain.losses, abs=ORDER_OF_SUMS)
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(
            simulated.tensors[name], tensor, rtol=ORDER_OF_SUMS, atol=ORDER_OF_SUMS
        )


QUICK = [
    ("checkpoints", "sides late"),
    ("all on host", "random"),
    ("all on disk", "sides early"),
]
"""Cases and schedules that every run of the tests takes; the slow tests take them all."""


@pytest.mark.parametrize(("name", "schedule"), QUICK)
def test_no_schedule_changes_a_bit(run: Runs, name: str, schedule: str):
    by_name = {each.name: each for each in SCHEDULES}
    _assert_unchanged(run, CASES[name], by_name[schedule], [0])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("name", CASES)
def test_no_schedule_changes_a_bit_with_many_seeds(run: Runs, name: str, schedule: Schedule):
    seeds = range(1, 1 + SEEDS) if schedule.name == "random" else [0]
    _assert_unchanged(run, CASES[name], schedule, seeds)


def _assert_unchanged(run: Runs, case: Case, schedule: Schedule, seeds: Iterable[int]) -> None:
    expected = run.at_once(case)
    for seed in seeds:
        with SimulatedDevice(schedule, seed=seed) as device:
            assert run(case, device).equals(expected), f"seed {seed}"
        assert device.simulation.faults == []
        assert device.simulation.operations > MANY


@pytest.mark.parametrize("name", ["all on host", "all on disk"])
def test_a_run_that_ends_early_gives_no_memory_back_that_copies_still_use(
    run: Runs, name: str, tmp_path: Path
):
    with SimulatedDevice(SCHEDULES[0]) as device:
        steps = run.steps(CASES[name], device, tmp_path)
        next(steps)
        steps.close()
    assert device.simulation.faults == []


def test_a_save_that_fails_gives_no_memory_back_that_copies_still_use():
    with SimulatedDevice(SCHEDULES[0]) as device:
        staging = HostStaging(device, block_bytes=64)
        blocks = staging.blocks(torch.ones(256, device=device.torch_device))
        next(blocks)
        blocks.close()
        staging.close()
    assert device.simulation.faults == []


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=lambda schedule: schedule.name)
def test_a_large_buffer_passes_unchanged_through_both_halves_of_bounce_buffers(
    schedule: Schedule, tmp_path: Path
):
    content = (torch.arange(2 * BOUNCE_BYTES + 5) % 251).to(torch.uint8)
    with SimulatedDevice(schedule) as device:
        bounce = (BounceBuffer(device), BounceBuffer(device))
        with DirectFile(tmp_path / "file", write=True) as file:
            file.resize(round_up_to_page(len(content)))
            bounced = BouncedFile(file, *bounce)
            result = torch.zeros(len(content), dtype=torch.uint8, device=device.torch_device)
            bounced.write(device.to_device(content), 0)
            bounced.read(result, 0)
            assert torch.equal(result.cpu(), content)
        for buffer in bounce:
            buffer.close()
    assert device.simulation.faults == []


class Mutant(NamedTuple):
    """What is left out of a run, and of which."""

    case: str
    site: Site


class Caught(NamedTuple):
    """How a mutant was noticed."""

    by_values: bool
    """Whether the run broke, or a bit of its results changed."""
    by_clocks: bool
    """Whether uses of memory were reported that no event orders."""


class KeptTensors:
    """Notes, and leaves out, what transfers keep alive until they end.

    Args:
        drop: the sites that keep nothing.
    """

    def __init__(self, drop: frozenset[Site]) -> None:
        self.sites: set[Site] = set()
        submit = TransferQueue.submit

        def submit_some(
            queue: TransferQueue, transfer: Callable[..., None], *uses: torch.Tensor
        ) -> TransferHandle:
            site: Site = ("keep", *callers())
            if uses:
                self.sites.add(site)
            return submit(queue, transfer, *(() if site in drop else uses))

        self._patch = patch.object(TransferQueue, "submit", submit_some)

    def __enter__(self) -> None:
        self._patch.__enter__()

    def __exit__(self, *error: object) -> None:
        self._patch.__exit__(*error)


def caught(run: Runs, mutant: Mutant, schedule: Schedule) -> Caught:
    """How a mutant was noticed under one schedule."""
    drop, expected = frozenset([mutant.site]), run.at_once(CASES[mutant.case])
    kept = KeptTensors(drop)
    with (
        kept,
        SimulatedDevice(schedule, drop=drop) as device,
    ):
        try:
            equals = run(CASES[mutant.case], device).equals(expected)
        except (WindlassError, RuntimeError, IndexError):
            equals = False
    return Caught(not equals, bool(device.simulation.faults))


@pytest.mark.parametrize(
    ("what", "where", "schedule"),
    [
        ("wait", "OffloadedLayer.wait", "late"),
        ("wait", "TransferQueue._run", "sides early"),
        ("keep", "OffloadedLayer.offload_grads", "late"),
    ],
)
def test_a_wait_or_hold_that_is_left_out_changes_what_a_run_computes(
    run: Runs, what: str, where: str, schedule: str
):
    name, under = "all on host", {each.name: each for each in SCHEDULES}[schedule]
    fitting = [
        site
        for site in run.sites(name)
        if site[0] == what and any(call.partition("+")[0] == where for call in site)
    ]
    assert fitting
    assert any(caught(run, Mutant(name, site), under).by_values for site in fitting)


SURVIVORS = {
    "keep < OffloadTier.submit < OffloadedLayer.update < ParamStore.flush_deferred_updates":
        "the store keeps the divisor of the gradients until all updates have ended",
    "synchronize < BouncedFile._write_half < BouncedFile.write < write_bytes":
        "a tail is host memory, whose copy is done at once",
    "synchronize < EventTimer.run < Interpreter._run < Interpreter.run":
        "it waits for the times of a step; numbers are waited for where they are read",
    "synchronize < HostStaging.blocks < _contents < write_tensors":
        "only a save that fails leaves a copy under way; a test of its own does that",
    "synchronize < TransferQueue.close < RankParts.close < _Run.close":
        "only a run that ends early leaves a copy under way; a test of its own does that",
    "wait < AsyncSaver._write_layers < AsyncSaver._save":
        "the timer has made the host wait for the step before",
    "wait < TransferHandle.wait < OffloadedLayer._drop_loaded < OffloadedLayer.free":
        "the layer that computed with the weights has waited for them",
    "wait < TransferHandle.wait < OffloadedLayer.wait_for_transfer < ParamStore._wait":
        "the host waits for the whole queue right after",
    "wait < TransferQueue._run_in < "
    "TransferQueue.pipelined.<locals>.submit_read.<locals>.read_item":
        "the host has waited for each copy to a file",
}  # fmt: skip
"""What may be left out unnoticed, by what it does and the functions that ask for it, and why."""


@pytest.mark.slow
def test_every_wait_and_hold_that_is_left_out_is_noticed_or_known_to_be_spare(run: Runs):
    noticed: dict[Site, Counter[str]] = {}
    for name in CASES:
        for site in run.sites(name):
            if sum(noticed.get(site, Counter()).values()):
                continue
            counts = noticed.setdefault(site, Counter())
            for schedule in SCHEDULES:
                result = caught(run, Mutant(name, site), schedule)
                counts[f"{schedule.name}, values"] += result.by_values
                counts[f"{schedule.name}, clocks"] += result.by_clocks
    survivors = {_words(site) for site, counts in noticed.items() if not sum(counts.values())}
    totals = Counter[str]()
    for counts in noticed.values():
        totals += counts
    print(f"\n{len(noticed)} mutants, {len(noticed) - len(survivors)} noticed", dict(totals))
    assert survivors <= set(SURVIVORS)


def _words(site: Site) -> str:
    """A site without the lines, which change."""
    return " < ".join(part.partition("+")[0] for part in site)
