"""A model that passes through the near tier in phases, against the same model held there whole."""

import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from windlass.capture.capture_layers import capture_graph
from windlass.data.batches import Batches
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.program.memory.offloaded_bytes import offloaded_bytes_by_tier
from windlass.program.memory.tier_traffic import TierTraffic, sum_tiers
from windlass.runtime.checkpoint.checkpoint import latest_checkpoint, checkpoint_folders
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train
from windlass.schema.plan import Batch, Offload, Plan, Stage
from windlass.schema.request import TrainRequest
from windlass.schema.run_record import Step

SEQUENCE = 16
FAR = Offload(parameters="disk", gradients="disk", optimizer="disk")
HOST = Offload(parameters="host", gradients="host", optimizer="host")
PHASES = {
    1: ((0, 5),),
    2: ((0, 2), (2, 5)),
    3: ((0, 1), (1, 3), (3, 5)),
    5: ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)),
}
"""Cuts of embedding, three blocks and head."""

FILLING = 400 * 4096
"""Bytes: headers, and less than a page behind each of 40 weights in up to 7 regions or files."""

Run = Callable[..., tuple[list[Step], dict[str, torch.Tensor]]]


@pytest.fixture
def run(
    gpt: Callable[..., LayerStack],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainRequest],
    tmp_path: Path,
) -> Run:
    """Trains under a cut and gives the steps, and all tensors of the last checkpoint."""

    def go(
        phases: int,
        *,
        home: Offload | None = None,
        micro: int = 4,
        accumulation: int = 1,
        precision: str = "float32",
        moments: str = "float32",
        compiled: bool = False,
        recompute: str = "none",
        name: str = "run",
        resume: bool = False,
        until: int | None = None,
        look: Callable[[], None] = lambda: None,
        rooms: list[int] | None = None,
        dials: dict[str, float] | None = None,
        **asked: object,
    ) -> tuple[list[Step], dict[str, torch.Tensor]]:
        chain = gpt(device="meta", dropout=0.1, **(dials or {}))
        graph = capture_graph(chain)
        plan = Plan(
            graph=graph.label,
            machine="here@000000000000",
            precision=precision,
            moments=moments,
            compile=compiled,
            clip=asked.get("clip", 0.5) is not None,
            offload=home or (FAR if phases > 1 else Offload()),
            batch=Batch(sequence=SEQUENCE, micro=micro, accumulation=accumulation),
            stages=(Stage(phases=PHASES[phases], recompute=recompute),),
        )
        if rooms is not None:
            rooms.append(sum(offloaded_bytes_by_tier(plan, graph)["disk"].values()))
        folder = tmp_path / name / "checkpoints"
        request = settings(batch=micro * accumulation, **asked)
        steps = []
        context = RankContext(
            plan=plan,
            stack=chain,
            program=lower(plan, graph)[0],
            settings=request,
            checkpoints=folder,
        )
        newest = latest_checkpoint(folder) if resume else None
        for step in train(context, batches(batch=micro * accumulation), resume=newest):
            steps.append(step)
            look()
            if step.step == until:
                break
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(checkpoint_folders(folder)[-1].glob("*.safetensors")):
            tensors |= load_file(file)
        return steps, {key: t for key, t in tensors.items() if not key.startswith("zeros/")}

    return go


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("phases", [2, 3, 5])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_phases_give_the_weights_of_the_run_in_memory_bit_for_bit(
    run: Run, phases: int, precision: str, accumulation: int
):
    shape = {"precision": precision, "accumulation": accumulation, "micro": 2}
    whole, held = run(1, name="whole", **shape)
    steps, streamed = run(phases, **shape)
    assert [s.loss for s in steps] == [s.loss for s in whole]
    assert [s.gradient_norm for s in steps] == [s.gradient_norm for s in whole]
    assert steps[-1].held_out_loss == whole[-1].held_out_loss
    assert same(streamed, held)


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [0.5, None])
def test_moments_in_fewer_bits_are_the_same_in_phases_and_in_memory(
    run: Run, moments: str, precision: str, clip: float | None
):
    shape = {"precision": precision, "accumulation": 2, "micro": 2, "moments": moments}
    shape |= {"clip": clip, "dials": {"width": 96}}  # 300 x 96: the last block is cut short
    whole, held = run(1, name="whole", **shape)
    steps, streamed = run(3, **shape)
    assert [s.loss for s in steps] == [s.loss for s in whole]
    assert same(streamed, held)
    one = next(tensor for name, tensor in held.items() if name.startswith("moment1/"))
    assert one.dtype == {"bfloat16": torch.bfloat16, "int8": torch.int8}[moments]


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_moments_in_fewer_bits_go_on_bit_for_bit_wherever_they_were_saved(run: Run, moments: str):
    asked = {"steps": 6, "save_every": 2, "moments": moments, "precision": "bfloat16"}
    _, whole = run(1, name="whole", **asked)
    run(3, until=2, **asked)
    run(1, resume=True, until=4, **asked)
    _, mixed = run(3, resume=True, **asked)
    assert same(mixed, whole)


@pytest.mark.parametrize(("before", "after"), [*permutations(["float32", "bfloat16", "int8"], 2)])
def test_a_checkpoint_goes_on_with_moments_in_another_format_in_memory_as_in_phases(
    run: Run, tmp_path: Path, before: str, after: str
):
    run(3, name="far", steps=4, save_every=2, until=2, moments=before)
    shutil.copytree(tmp_path / "far", tmp_path / "near")
    asked = {"steps": 4, "save_every": 4, "moments": after, "resume": True}
    steps, far = run(3, name="far", **asked)
    whole, near = run(1, name="near", **asked)
    assert [s.step for s in steps] == [3, 4]
    assert [s.loss for s in steps] == [s.loss for s in whole]
    assert same(far, near)


@pytest.mark.parametrize("moments", ["float32", "int8"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.5), (2, 0.5), (2, None)])
def test_the_room_that_was_predicted_is_what_the_files_take(
    run: Run, tmp_path: Path, moments: str, precision: str, accumulation: int, clip: float | None
):
    shape = {"precision": precision, "moments": moments, "accumulation": accumulation}
    taken: list[int] = []
    rooms: list[int] = []

    def look() -> None:
        files = (tmp_path / "run" / "state").iterdir()
        taken.append(sum(file.stat().st_size for file in files))

    run(
        3, micro=2, clip=clip, look=look, rooms=rooms, steps=1,
        dials={"width": 256}, **shape,
    )  # fmt: skip
    (room,) = rooms
    assert room <= taken[0] <= room + FILLING


@pytest.mark.parametrize("phases", [2, 3, 5])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_home_in_memory_gives_the_same_bits_and_makes_no_files(
    run: Run, tmp_path: Path, phases: int, precision: str
):
    shape = {"precision": precision, "accumulation": 2, "micro": 2}
    found: set[str] = set()

    def look() -> None:
        found.update(path.name for path in (tmp_path / "run").glob("*"))

    whole, held = run(1, name="whole", **shape)
    steps, streamed = run(phases, home=HOST, look=look, **shape)
    assert [s.loss for s in steps] == [s.loss for s in whole]
    assert [s.gradient_norm for s in steps] == [s.gradient_norm for s in whole]
    assert steps[-1].held_out_loss == whole[-1].held_out_loss
    assert same(streamed, held)
    assert found <= {"checkpoints"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_home_in_memory_moves_the_bytes_that_one_in_files_does(run: Run, precision: str):
    shape = {"precision": precision, "accumulation": 2, "micro": 2, "clip": None}
    files, _ = run(3, name="files", **shape)
    memory, _ = run(3, home=HOST, **shape)
    for way in ("read_bytes", "written_bytes"):
        moved = [sum(getattr(step, way) for step in steps) for steps in (memory, files)]
        assert moved[0] == moved[1] > 0


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_classes_may_have_homes_in_different_tiers(run: Run, moments: str):
    shape = {"precision": "bfloat16", "accumulation": 2, "micro": 2, "moments": moments}
    _, held = run(1, name="whole", **shape)
    for home in (
        Offload(parameters="host", gradients="host", optimizer="disk"),
        Offload(parameters="disk", gradients="host", optimizer="host"),
    ):
        _, streamed = run(3, name=home.optimizer, home=home, **shape)
        assert same(streamed, held)


def test_a_run_goes_on_from_files_in_memory_and_back(run: Run):
    asked = {"steps": 6, "save_every": 2, "moments": "int8", "precision": "bfloat16"}
    _, whole = run(1, name="whole", **asked)
    run(3, home=HOST, until=2, **asked)
    run(2, resume=True, until=4, **asked)
    _, mixed = run(3, home=HOST, resume=True, **asked)
    assert same(mixed, whole)


def test_without_clipping_layers_are_updated_in_their_phase_with_the_same_result(run: Run):
    _, held = run(1, name="whole", clip=None)
    _, streamed = run(3, clip=None)
    assert same(streamed, held)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_only_the_optimizer_may_be_away(run: Run, tmp_path: Path, tier: str):
    found: set[str] = set()

    def look() -> None:
        found.update(path.name for path in (tmp_path / "run").glob("*"))

    shape = {"precision": "bfloat16", "dials": {"width": 128}}
    _, held = run(1, name="whole", **shape)
    steps, streamed = run(1, home=Offload(optimizer=tier), look=look, **shape)
    assert same(streamed, held)
    assert ("state" in found) == (tier == "disk")
    # Masters and moments come and go; the weights that layers compute with stay.
    state = sum(t.nbytes for name, t in held.items() if name.startswith(("weight/", "moment")))
    # A step may end before its last write; the last step of a run waits for all.
    read, written = sum(s.read_bytes for s in steps), sum(s.written_bytes for s in steps)
    most = (1 + PADDING) * state + FILLING
    assert len(steps) * state <= read == written <= len(steps) * most


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_stream_as_they_run_in_memory(run: Run):
    _, held = run(1, name="whole", precision="bfloat16", compiled=True)
    _, streamed = run(3, precision="bfloat16", compiled=True)
    assert same(streamed, held)


def test_a_stopped_run_goes_on_from_its_checkpoint_as_if_nothing_happened(run: Run):
    _, whole = run(3, name="whole", steps=6, save_every=2)
    run(3, steps=6, save_every=2, until=4)
    _, resumed = run(3, steps=6, save_every=2, resume=True)
    assert same(resumed, whole)


def test_a_streamed_checkpoint_goes_on_in_memory_and_back(run: Run):
    _, whole = run(1, name="whole", steps=6, save_every=2)
    run(3, steps=6, save_every=2, until=2)
    run(1, steps=6, save_every=2, resume=True, until=4)
    _, mixed = run(3, steps=6, save_every=2, resume=True)
    assert same(mixed, whole)


def test_a_checkpoint_does_not_change_with_the_updates_after_it(run: Run, tmp_path: Path):
    run(3, steps=6, save_every=2, keep=3)
    folder = tmp_path / "run" / "checkpoints"
    kept = checkpoint_folders(folder)
    assert len(kept) == 3
    assert latest_checkpoint(folder).damaged == ()
    for path in kept[1:]:
        shutil.rmtree(path)
    assert latest_checkpoint(folder).manifest.step == 2


def test_nothing_of_the_state_is_left_on_disk_but_the_checkpoints(run: Run, tmp_path: Path):
    run(3, steps=2, save_every=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(("phases", "precision"), [(5, "float32"), (5, "bfloat16"), (2, "float32")])
def test_outputs_that_wait_elsewhere_come_back_as_they_were(
    run: Run, tmp_path: Path, tier: str, phases: int, precision: str
):
    shape = {"precision": precision, "accumulation": 3, "micro": 2}
    whole, held = run(1, name="whole", **shape)
    steps, streamed = run(phases, home=HOST.model_copy(update={"activations": tier}), **shape)
    assert [s.loss for s in steps] == [s.loss for s in whole]
    assert [s.gradient_norm for s in steps] == [s.gradient_norm for s in whole]
    assert same(streamed, held)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_only_outputs_may_be_away_and_move_the_bytes_that_the_program_says(
    run: Run, gpt: Callable[..., LayerStack], tier: str
):
    shape = {"accumulation": 3, "micro": 2, "recompute": "full"}
    _, held = run(1, name="whole", **shape)
    steps, away = run(1, home=Offload(activations=tier), **shape)
    assert same(away, held)
    graph = capture_graph(gpt(device="meta", dropout=0.1))
    plan = Plan(
        graph=graph.label, machine="here@000000000000", offload=Offload(activations=tier),
        batch=Batch(sequence=SEQUENCE, micro=2, accumulation=3),
        stages=(Stage(phases=PHASES[1], recompute="full"),),
    )  # fmt: skip
    due = sum_tiers(TierTraffic(plan, graph).total(lower(plan, graph)[0].instructions))
    assert due.read == due.written > 0
    assert {(step.read_bytes, step.written_bytes) for step in steps} == {tuple(due)}


PADDING = 0.02
"""Share by which pages that are not full lift the traffic of layers this wide."""


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_moves_the_bytes_that_its_program_says(
    run: Run, gpt: Callable[..., LayerStack], precision: str
):
    shape = {"precision": precision, "accumulation": 2, "micro": 2, "dials": {"width": 256}}
    steps, _ = run(3, steps=4, evaluate_every=4, save_every=4, **shape)
    graph = capture_graph(gpt(device="meta", dropout=0.1, width=256))
    plan = Plan(
        graph=graph.label, machine="here@000000000000", precision=precision, offload=FAR,
        batch=Batch(sequence=SEQUENCE, micro=2, accumulation=2), stages=(Stage(phases=PHASES[3]),),
    )  # fmt: skip
    (program,), traffic = lower(plan, graph), TierTraffic(plan, graph)
    first = sum_tiers(traffic.total(program.instructions, stored=False))
    again = sum_tiers(traffic.total(program.instructions))
    last = again.plus(sum_tiers(traffic.total(program.flush_deferred_updates)))
    # All steps together: a move that is under way when its step ends counts to the next one.
    due = first.plus(again).plus(again).plus(last)
    assert sum(step.read_bytes for step in steps) == pytest.approx(due.read, rel=PADDING)
    assert sum(step.written_bytes for step in steps) == pytest.approx(due.written, rel=PADDING)


def test_a_run_in_memory_moves_nothing(run: Run):
    steps, _ = run(1)
    assert {(step.read_bytes, step.written_bytes, step.flush_seconds) for step in steps} == {
        (0, 0, 0.0)
    }
