"""The room that a run asks for on its disk, against what a real run takes of it."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from windlass.capture.capture_layers import capture_graph
from windlass.data.batches import Batches
from windlass.data.token_files import TokenDataset
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.program.memory.disk_usage import disk_usage
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train
from windlass.schema.graph import Graph
from windlass.schema.plan import Batch, Offload, Plan, Stage
from windlass.schema.request import TrainRequest

SEQUENCE = 16
FAR = Offload(parameters="disk", gradients="disk", optimizer="disk")
TAILS = 1.1
"""Headers and pages that are not full, of layers this small; and the room of gradients that the
first phase keeps for itself."""


class Fullest:
    """Looks at a folder again and again, and remembers the most that its files took."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        sizes: dict[int, int] = {}
        for folder, _, files in os.walk(self._folder):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                    found = Path(folder, name).stat()
                    sizes[found.st_ino] = found.st_blocks * 512
        self.most = max(self.most, sum(sizes.values()))

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.look()


@pytest.fixture(scope="module")
def model(tokens: TokenDataset) -> tuple[LayerStack, Graph]:
    dials = {
        "layers": 3, "width": 128, "heads": 4, "sequence": SEQUENCE,
        "vocabulary": tokens.vocabulary,
    }  # fmt: skip
    stack = build_layer_stack("gpt-tiny", dials, device="meta", seed=7)
    return stack, capture_graph(stack)


@pytest.mark.parametrize(
    ("streamed", "precision"), [(False, "float32"), (True, "float32"), (True, "bfloat16")]
)
@pytest.mark.parametrize(("save_every", "keep"), [(1, 1), (2, 2)])
def test_a_run_takes_the_room_that_it_asks_for_and_no_more(
    model: tuple[LayerStack, Graph],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainRequest],
    tmp_path: Path,
    streamed: bool,
    precision: str,
    save_every: int,
    keep: int,
):
    stack, graph = model
    phases = tuple((layer, layer + 1) for layer in range(5)) if streamed else ((0, 5),)
    plan = Plan(
        graph=graph.label, machine="here@000000000000", precision=precision,
        offload=FAR if streamed else Offload(),
        batch=Batch(sequence=SEQUENCE, micro=2, accumulation=2), stages=(Stage(phases=phases),),
    )  # fmt: skip
    request = settings(steps=6, save_every=save_every, keep=keep)
    with Fullest(tmp_path) as fullest:
        context = RankContext(
            plan=plan, stack=stack, program=lower(plan, graph)[0], settings=request,
            checkpoints=tmp_path / "checkpoints",
        )  # fmt: skip
        for _ in train(context, batches()):
            fullest.look()
        fullest.look()
    asked = disk_usage(plan, graph, request)
    assert fullest.most <= TAILS * asked.needed_bytes
    # Whether the oldest checkpoint is still there when the newest is alone is a matter of timing.
    assert fullest.most >= asked.needed_bytes - asked.checkpoint_bytes


def test_a_streamed_run_that_saves_only_at_its_end_holds_its_state_once(
    model: tuple[LayerStack, Graph], settings: Callable[..., TrainRequest]
):
    _, graph = model
    plan = Plan(
        graph=graph.label, machine="here@000000000000", offload=FAR,
        batch=Batch(sequence=SEQUENCE, micro=2), stages=(Stage(phases=((0, 2), (2, 5))),),
    )  # fmt: skip
    asked = disk_usage(plan, graph, settings(steps=6, save_every=6, keep=3))
    assert asked.needed_bytes == asked.state_bytes
    assert asked.checkpoint_bytes == 12 * graph.parameter_count


def test_a_state_in_memory_takes_no_room_but_that_of_checkpoints(
    model: tuple[LayerStack, Graph], settings: Callable[..., TrainRequest]
):
    _, graph = model
    home = Offload(parameters="host", gradients="host", optimizer="host")
    far = Plan(
        graph=graph.label, machine="here@000000000000", offload=home,
        batch=Batch(sequence=SEQUENCE, micro=2), stages=(Stage(phases=((0, 2), (2, 5))),),
    )  # fmt: skip
    near = far.model_copy(update={"offload": Offload(), "stages": (Stage(phases=((0, 5),)),)})
    request = settings(steps=6, save_every=2, keep=1)
    assert disk_usage(far, graph, request) == disk_usage(near, graph, request)
