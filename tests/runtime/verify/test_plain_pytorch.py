"""Runs compared with plain PyTorch, and batches with the written order of the data."""

import ast
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from windlass.data.batches import Batches
from windlass.data.dataset_cache import prepare_dataset
from windlass.data.excerpt import write_excerpt
from windlass.data.keyed_choices.mlm_masking import MlmMasking
from windlass.data.packing.sentence_pairs import PairTokens, sentence_pair_batches
from windlass.data.token_files import TokenDataset, open_dataset
from windlass.models.layer_stack import LayerStack
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.runtime.verify import plain_loop
from windlass.runtime.verify.compare_runs import InstrumentedRun
from windlass.runtime.verify.compare_to_plain import compare_to_plain_pytorch
from windlass.runtime.verify.plain_loop.data_order import PlainMasking, read_plain_batches
from windlass.runtime.verify.plain_loop.pairs import read_plain_pairs
from windlass.schema.answers.verification import VerificationResult
from windlass.schema.data_request import DataRequest
from windlass.schema.plan import Plan
from windlass.schema.train_request import TrainSettings

MASK_TOKEN = 256


def two_epochs(tokens: TokenDataset, folder: Path, *, batch: int, masked: bool) -> Batches:
    """Batches of an excerpt of 6 windows, and of a held-out text of 5."""
    write_excerpt(tokens, folder, train=[6 * 16 + 9], held_out=5 * 16 + 1)
    excerpt = open_dataset(folder)
    assert excerpt is not None
    masking = MlmMasking(mask_token=MASK_TOKEN, vocabulary=256, ignore_index=-100)
    return Batches(excerpt, sequence=16, batch=batch, seed=3, masking=masking if masked else None)


@pytest.fixture
def compared(
    gpt: Callable[..., LayerStack],
    tokens: TokenDataset,
    plan: Callable[..., Plan],
    program: Callable[[Plan], object],
    settings: Callable[..., TrainSettings],
    folder: Path,
    tmp_path: Path,
) -> Callable[..., VerificationResult]:
    """Trains two epochs, and compares them with plain PyTorch under other settings."""

    def run(
        *, masked: bool = False, change: dict[str, object] | None = None, **dials: float
    ) -> VerificationResult:
        batches = two_epochs(tokens, tmp_path / "tokens", batch=4, masked=masked)
        train = settings(seed=3, evaluate_sequences=5)
        stack = gpt(device="meta", **dials)
        two_micro_batches = plan(stack, micro=2, accumulation=2, precision="float64")
        context = RankContext(
            plan=two_micro_batches, stack=stack, program=program(two_micro_batches),
            settings=train, checkpoints=folder,
        )  # fmt: skip
        steps = tuple(train_loop(context, batches))
        return compare_to_plain_pytorch(
            InstrumentedRun(folder=folder.parent, steps=steps),
            two_micro_batches,
            gpt(device="meta", **dials),
            batches,
            train.model_copy(update=change or {}),
            schedule=train,
        )

    return run


@pytest.mark.parametrize("masked", [False, True], ids=["next token", "masked tokens"])
def test_two_epochs_equal_plain_pytorch_with_dropout_clipping_and_accumulation(
    compared: Callable[..., VerificationResult], masked: bool
):
    result = compared(masked=masked, dropout=0.1)
    assert result.passed, result.first_mismatch
    counts = {item.quantity: item.count for item in result.comparisons}
    assert counts["tokens"] == 12
    assert counts["held-out loss"] == counts["held-out bits per byte"] == 1
    assert counts["learning rate"] == 203


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        ({"learning_rate": 9e-3}, "learning rate"),
        ({"clip": 0.4}, "loss"),
        ({"weight_decay": 0.11}, "loss"),
        ({"betas": (0.9, 0.96)}, "loss"),
        ({"epsilon": 1.1e-4}, "loss"),
        ({"evaluate_sequences": 4}, "held-out loss"),
    ],
)
def test_another_setting_than_that_of_the_run_is_found(
    compared: Callable[..., VerificationResult], change: dict[str, object], quantity: str
):
    result = compared(change=change)
    assert result.first_mismatch is not None
    assert result.first_mismatch.quantity == quantity


@pytest.mark.parametrize("masked", [False, True], ids=["next token", "masked tokens"])
def test_the_batches_of_three_epochs_are_those_of_the_written_order(
    tokens: TokenDataset, tmp_path: Path, masked: bool
):
    batches = two_epochs(tokens, tmp_path / "tokens", batch=3, masked=masked)
    masking = PlainMasking(MASK_TOKEN, 256) if masked else None
    plain = read_plain_batches(tmp_path / "tokens", sequence=16, batch=3, seed=3, masking=masking)
    for step in range(1, 7):
        for ours, theirs in zip(batches.samples(step), plain.samples(step), strict=True):
            assert ours.tolist() == theirs.tolist()
    inputs, targets, _ = plain.held_out_samples(3)
    ours, their_targets = next(batches.held_out_batches(3, rows=3))
    assert ours.tolist() == inputs.tolist()
    assert their_targets.tolist() == targets.tolist()


@pytest.mark.parametrize("weights", [None, (3.0, 0.004)])
def test_batches_of_several_sources_are_those_of_the_written_order(
    tmp_path: Path, weights: tuple[float, float] | None
):
    for name, words in (("a", 40), ("b", 70)):
        (tmp_path / name).mkdir()
        for index in range(3):
            text = " ".join(f"{name}{(index * 5 + at) % 17}" for at in range(words))
            (tmp_path / name / f"{index}.txt").write_text(text)
    sources = (str(tmp_path / "a"), str(tmp_path / "b"))
    data = DataRequest(source=sources, tokenizer="byte", held_out=0.3)
    dataset = prepare_dataset(data, cache=tmp_path / "cache")
    batches = Batches(dataset, sequence=8, batch=50, seed=5, weights=weights)
    plain = read_plain_batches(dataset.folder, sequence=8, batch=50, seed=5, weights=weights)
    for step in (1, 2, 21):
        assert batches.samples(step)[1].tolist() == plain.samples(step)[1].tolist()


def test_pairs_of_several_sources_are_those_of_the_written_order(tmp_path: Path) -> None:
    for name, words in (("a", 40), ("b", 70)):
        (tmp_path / name).mkdir()
        for index in range(3):
            text = " ".join(f"{name}{(index * 5 + at) % 17}" for at in range(words))
            (tmp_path / name / f"{index}.txt").write_text(text)
    sources = (str(tmp_path / "a"), str(tmp_path / "b"))
    dataset = prepare_dataset(
        DataRequest(source=sources, tokenizer="byte", held_out=0.3), cache=tmp_path / "cache"
    )
    batches = sentence_pair_batches(
        dataset, sequence=24, batch=30, seed=5,
        masking=MlmMasking(mask_token=259, vocabulary=257, ignore_index=-100),
        special=PairTokens(first=258, separator=256, second_offset=260),
    )  # fmt: skip
    plain = read_plain_pairs(
        dataset.folder, sequence=24, batch=30, seed=5, weights=None,
        masking=PlainMasking(259, 257), first=258, vocabulary=260,
    )  # fmt: skip
    for step in (1, 2, 9):
        for ours, theirs in zip(batches.samples(step), plain.samples(step), strict=True):
            assert ours.tolist() == theirs.tolist()
        assert batches.document_ids(step, 0, 30).tolist() == plain.documents(step).tolist()
    ((inputs, targets),) = batches.held_out_batches(6, 6)
    *expected, nbytes = plain.held_out_samples(6)
    assert [inputs.tolist(), targets.tolist()] == [part.tolist() for part in expected]
    learned = int((targets[:, :24] != -100).sum())
    assert batches.bits_per_byte(1.0, 6) == pytest.approx(learned / math.log(2) / nbytes)


@pytest.mark.parametrize(
    "path", sorted(Path(str(plain_loop.__file__)).parent.glob("*.py")), ids=lambda path: path.stem
)
def test_the_reference_imports_nothing_that_trains(path: Path):
    tree = ast.parse(path.read_text())
    imported = {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    ours = {name for name in imported if name.startswith("windlass")}
    plain = {name for name in ours if name.startswith(f"{plain_loop.__name__}.")}
    assert ours <= {"windlass.schema", *plain}
