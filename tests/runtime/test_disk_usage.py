"""The disk space that is predicted for a run, compared with what a real run uses."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from factories import catalog_graph
from program.frozen_graph import frozen_graph
from windlass.data.batches import Batches
from windlass.data.token_files import TokenDataset
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.program.memory.disk_usage import disk_usage
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.graph import Graph
from windlass.schema.plan import Batch, Offload, Plan, Stage
from windlass.schema.train_request import TrainSettings

SEQUENCE = 16
OFFLOADED = Offload(parameters="disk", gradients="disk", optimizer="disk")
TAILS = 1.1
"""Allows for headers and partly filled pages, which matter for small layers, and for the gradients
of the first phase."""


class PeakUsage:
    """Samples the size of a folder's files repeatedly, and keeps the largest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def sample(self) -> None:
        sizes: dict[int, int] = {}
        for folder, _, files in os.walk(self._folder):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                    status = Path(folder, name).stat()
                    sizes[status.st_ino] = status.st_blocks * 512
        self.peak_bytes = max(self.peak_bytes, sum(sizes.values()))

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.sample()


@pytest.fixture(scope="module")
def model(tokens: TokenDataset) -> tuple[LayerStack, Graph]:
    dials = {
        "layers": 3, "width": 128, "heads": 4, "sequence": SEQUENCE,
        "vocabulary": tokens.vocabulary,
    }  # fmt: skip
    stack = build_layer_stack("gpt-tiny", dials, device="meta", seed=7)
    return stack, catalog_graph("gpt-tiny", **dials)


@pytest.mark.parametrize(
    ("in_phases", "precision", "save_every", "keep"),
    [
        (False, "float32", 1, 1),
        (True, "float32", 2, 2),
        pytest.param(False, "float32", 2, 2, marks=pytest.mark.slow),
        pytest.param(True, "float32", 1, 1, marks=pytest.mark.slow),
        pytest.param(True, "bfloat16", 1, 1, marks=pytest.mark.slow),
        pytest.param(True, "bfloat16", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_uses_the_disk_space_that_is_predicted_and_no_more(
    model: tuple[LayerStack, Graph],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    tmp_path: Path,
    in_phases: bool,
    precision: str,
    save_every: int,
    keep: int,
):
    stack, graph = model
    phases = tuple((layer, layer + 1) for layer in range(5)) if in_phases else ((0, 5),)
    plan = Plan(
        graph=graph.label, machine="here@000000000000", precision=precision,
        offload=OFFLOADED if in_phases else Offload(),
        batch=Batch(sequence=SEQUENCE, micro=2, accumulation=2), stages=(Stage(phases=phases),),
    )  # fmt: skip
    request = settings(steps=6, save_every=save_every, keep=keep)
    with PeakUsage(tmp_path) as peak:
        context = RankContext(
            plan=plan, stack=stack, program=lower(plan, graph)[0], settings=request,
            checkpoints=tmp_path / "checkpoints",
        )  # fmt: skip
        for _ in train_loop(context, batches()):
            peak.sample()
        peak.sample()
    usage = disk_usage(plan, graph, request)
    assert peak.peak_bytes <= TAILS * usage.needed_bytes
    # Whether the oldest checkpoint still exists when the newest is complete depends on timing.
    assert peak.peak_bytes >= usage.needed_bytes - usage.checkpoint_bytes


def test_a_run_in_phases_that_saves_only_at_its_end_stores_its_state_once(
    model: tuple[LayerStack, Graph], settings: Callable[..., TrainSettings]
):
    _, graph = model
    plan = Plan(
        graph=graph.label, machine="here@000000000000", offload=OFFLOADED,
        batch=Batch(sequence=SEQUENCE, micro=2), stages=(Stage(phases=((0, 2), (2, 5))),),
    )  # fmt: skip
    usage = disk_usage(plan, graph, settings(steps=6, save_every=6, keep=3))
    assert usage.needed_bytes == usage.state_bytes
    assert usage.checkpoint_bytes == 12 * graph.parameter_count


def test_state_in_memory_needs_disk_space_only_for_checkpoints(
    model: tuple[LayerStack, Graph], settings: Callable[..., TrainSettings]
):
    _, graph = model
    offload = Offload(parameters="host", gradients="host", optimizer="host")
    offloaded = Plan(
        graph=graph.label, machine="here@000000000000", offload=offload,
        batch=Batch(sequence=SEQUENCE, micro=2), stages=(Stage(phases=((0, 2), (2, 5))),),
    )  # fmt: skip
    on_device = offloaded.model_copy(
        update={"offload": Offload(), "stages": (Stage(phases=((0, 5),)),)}
    )
    request = settings(steps=6, save_every=2, keep=1)
    assert disk_usage(offloaded, graph, request) == disk_usage(on_device, graph, request)


def test_offloaded_frozen_weights_take_space_once_and_none_where_they_stand_in_files(
    model: tuple[LayerStack, Graph], settings: Callable[..., TrainSettings]
):
    graph = frozen_graph(model[1], 3)
    frozen_bytes = 4 * (graph.parameter_count - graph.trained_count)
    host = Offload(parameters="host", gradients="host", optimizer="host")
    in_phases = Plan(
        graph=graph.label, machine="here@000000000000", offload=OFFLOADED,
        batch=Batch(sequence=SEQUENCE, micro=2), stages=(Stage(phases=((0, 2), (2, 5))),),
    )  # fmt: skip
    on_host = in_phases.model_copy(update={"offload": host})
    in_memory = in_phases.model_copy(
        update={"offload": Offload(), "stages": (Stage(phases=((0, 5),)),)}
    )
    request = settings(steps=6, save_every=2, keep=1)
    disk, shared, each = (
        disk_usage(plan, graph, request) for plan in (in_phases, on_host, in_memory)
    )
    standing = graph.model_copy(update={"base": "bfloat16"})
    in_place, elsewhere = (disk_usage(p, standing, request) for p in (in_phases, on_host))

    assert each.checkpoint_bytes - frozen_bytes == disk.checkpoint_bytes == shared.checkpoint_bytes
    assert disk.needed_bytes - in_place.needed_bytes == frozen_bytes
    assert elsewhere == shared
    assert (disk.shared_bytes, shared.shared_bytes, each.shared_bytes) == (0, frozen_bytes, 0)
