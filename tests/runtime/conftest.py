"""Tiny real models, corpora, plans and programs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from factories import catalog_graph, write_documents
from windlass.data.batches import Batches
from windlass.data.dataset_cache import prepare_dataset
from windlass.data.token_files import TokenDataset
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack
from windlass.program.instruction import Instruction, Program
from windlass.schema.data_request import DataRequest
from windlass.schema.graph import Graph
from windlass.schema.model_request import LoraRequest
from windlass.schema.plan import Batch, Plan, Stage
from windlass.schema.sparsity import SparsityRequest
from windlass.schema.train_request import TrainSettings

SEQUENCE = 16


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread: tiny models run faster with it, and the machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """A few small documents as bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    write_documents(folder)
    data = DataRequest(source=str(folder), tokenizer="byte", held_out=0.2)
    return prepare_dataset(data, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def batches(tokens: TokenDataset) -> Callable[..., Batches]:
    """Batches of the small corpus."""

    def make(batch: int = 4, sequence: int = SEQUENCE, seed: int = 3) -> Batches:
        return Batches(tokens, sequence=sequence, batch=batch, seed=seed)

    return make


def _shape(tokens: TokenDataset) -> dict[str, int | float]:
    """Dials of the tiny GPT."""
    return {
        "layers": 3, "width": 32, "heads": 4, "sequence": SEQUENCE, "vocabulary": tokens.vocabulary,
    }  # fmt: skip


@pytest.fixture(scope="session")
def gpt(tokens: TokenDataset) -> Callable[..., LayerStack]:
    """A tiny GPT with real weights."""

    def make(
        name: str = "gpt-tiny",
        *,
        device: str = "cpu",
        seed: int = 7,
        sparsity: SparsityRequest | None = None,
        lora: LoraRequest | None = None,
        **dials: float,
    ) -> LayerStack:
        shape = _shape(tokens) | dials
        return build_layer_stack(
            name, shape, device=device, seed=seed, sparsity=sparsity, lora=lora
        )

    return make


@pytest.fixture(scope="session")
def graph_of(tokens: TokenDataset) -> Callable[..., Graph]:
    """`graph_of(dropout=0.1)`: the graph of `gpt(dropout=0.1)`."""

    def graph(name: str = "gpt-tiny", **dials: float) -> Graph:
        return catalog_graph(name, **(_shape(tokens) | dials))

    return graph


@pytest.fixture(scope="session")
def plan() -> Callable[..., Plan]:
    """A plan for a stack on a single device."""

    def make(
        stack: LayerStack,
        micro: int = 4,
        accumulation: int = 1,
        recompute: str = "none",
        recompute_layers: int | None = None,
        **fields: object,
    ) -> Plan:
        return Plan(
            graph=f"{stack.name}@000000000000",
            machine="here@000000000000",
            batch=Batch(sequence=SEQUENCE, micro=micro, accumulation=accumulation),
            stages=(
                Stage(
                    phases=((0, len(stack.layers)),),
                    recompute=recompute,
                    recompute_layers=recompute_layers,
                ),
            ),
            **fields,
        )

    return make


@pytest.fixture(scope="session")
def settings() -> Callable[..., TrainSettings]:
    """Few steps with a learning rate high enough to see a difference.

    With AdamW's usual epsilon a gradient that is zero except for rounding (the keys' bias, which
    softmax cancels) would still move its weight by a full step, in a random direction.
    """

    def make(**fields: object) -> TrainSettings:
        few = {
            "steps": 3,
            "batch": 4,
            "sequence": 16,
            "learning_rate": 1e-2,
            "warmup": 0.4,
            "clip": 0.5,
        }
        few["epsilon"] = 1e-4
        rare = {"evaluate_every": 1000, "evaluate_sequences": 6, "save_every": 1000}
        return TrainSettings(**(few | rare | fields))

    return make


def program_of(plan: Plan) -> Program:
    """The program of a single device, written out independently of the lowering."""
    end = plan.stages[-1].end_layer
    count = plan.stages[0].recompute_layers
    recomputed = set(range(1, end - 1)[:count]) if plan.recompute == "full" else set()
    steps: list[Instruction] = []
    for micro in range(plan.batch.accumulation):
        steps.append(Instruction("load_batch", None, micro))
        steps += [Instruction("forward", layer, micro) for layer in range(end)]
        for layer in reversed(range(end)):
            if layer in recomputed:
                steps.append(Instruction("recompute", layer, micro))
            steps.append(Instruction("backward", layer, micro))
    steps += [Instruction("grad_norm")] if plan.clip else []
    steps += [Instruction("update", layer) for layer in range(end)]
    return Program(plan=plan.label, device=0, instructions=(*steps, Instruction("sync")))


@pytest.fixture(scope="session")
def program() -> Callable[[Plan], Program]:
    """See `program_of`."""
    return program_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder for checkpoints."""
    return tmp_path / "checkpoints"
