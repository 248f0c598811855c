"""Runs compared with plain PyTorch, and batches with the written order of the data."""

import ast
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from windlass.data.batches import Batches
from windlass.data.dataset_cache import prepare_dataset
from windlass.data.excerpt import beginnings, write_excerpt
from windlass.data.keyed_choices import MlmMasking
from windlass.data.packing.conversation_rows import conversation_batches
from windlass.data.packing.masked_rows import masked_batches
from windlass.data.packing.row_batches import RowBatches
from windlass.data.packing.sentence_pairs import PairTokens, sentence_pair_batches
from windlass.data.token_files import TokenDataset, open_dataset
from windlass.models.layer_stack import LayerStack
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.runtime.verify import plain_loop
from windlass.runtime.verify.compare_runs import InstrumentedRun
from windlass.runtime.verify.compare_to_plain import compare_to_plain_pytorch
from windlass.runtime.verify.plain_loop.data_order import PlainMasking, read_plain_batches
from windlass.runtime.verify.plain_loop.learned_rows import (
    PairTokens as PlainPairTokens,
    RowForm,
    read_plain_answers,
    read_plain_masked_text,
    read_plain_pairs,
)
from windlass.runtime.verify.plain_loop.rows import PlainRows
from windlass.schema.answers.verification import VerificationResult
from windlass.schema.data_request import DataRequest
from windlass.schema.plan import Batch, Plan
from windlass.schema.sparsity import ModelIdentity, SparsityRequest
from windlass.schema.train_request import TrainSettings

MASK_TOKEN = 256


def two_epochs(tokens: TokenDataset, folder: Path, *, batch: int, masked: bool) -> Batches:
    """Batches of an excerpt of 6 windows, and of a held-out text of 5."""
    train, held_out = beginnings(
        tokens, train=[6 * 16 + 9], held_out=5 * 16 + 1, documents=1, uneven=False
    )
    write_excerpt(tokens, folder, train=train, held_out=held_out)
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
        *,
        masked: bool = False,
        change: dict[str, object] | None = None,
        name: str = "gpt-tiny",
        rows: RowBatches | None = None,
        sparsity: SparsityRequest | None = None,
        ema: float | None = None,
        **dials: float,
    ) -> VerificationResult:
        batches = rows or two_epochs(tokens, tmp_path / "tokens", batch=4, masked=masked)
        train = settings(
            seed=3, evaluate_sequences=5, evaluate_every=2, ema=ema, sequence=batches.sequence
        )
        dials = {"sequence": batches.sequence, **dials}
        stack = gpt(name, device="meta", sparsity=sparsity, **dials)
        two_micro_batches = plan(stack, micro=2, accumulation=2, precision="float64")
        two_micro_batches = two_micro_batches.model_copy(
            update={
                "batch": Batch(sequence=batches.sequence, micro=2, accumulation=2),
                "model": ModelIdentity(name=name, sparsity=sparsity),
                "ema": ema,
            }
        )
        context = RankContext(
            plan=two_micro_batches, stack=stack, program=program(two_micro_batches),
            settings=train, checkpoints=folder,
        )  # fmt: skip
        steps = tuple(train_loop(context, batches))
        return compare_to_plain_pytorch(
            InstrumentedRun(folder=folder.parent, steps=steps),
            two_micro_batches,
            gpt(name, device="meta", sparsity=sparsity, **dials),
            batches,
            train.model_copy(update=change or {}),
            schedule=train,
            masks=sparsity,
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
    assert counts["held-out loss"] == counts["held-out bits per byte"] == 2
    assert counts["learning rate"] == 203


@pytest.mark.parametrize("balance", [{"balance_loss": 0.3}, {"capacity": 1.1, "balance_bias": 0.1}])
def test_experts_equal_a_loop_over_all_of_them_with_a_loss_that_balances_them(
    compared: Callable[..., VerificationResult], balance: dict[str, float]
):
    result = compared(name="llama-tiny", experts=4, expert_ffn=16, **balance)
    assert result.passed, result.first_mismatch


@pytest.mark.parametrize("schedule", ["rigl", "set"])
def test_masks_that_move_equal_those_of_dense_gradients_in_plain_pytorch(
    compared: Callable[..., VerificationResult], schedule: str
):
    # Three of four blocks are absent, so that scores decide which of them come.
    sparsity = SparsityRequest(level=0.75, block=16, schedule=schedule, every=1)
    result = compared(sparsity=sparsity, width=128, ema=0.9)
    assert result.passed, result.first_mismatch
    counts = {item.quantity: item.count for item in result.comparisons}
    assert counts["mask update"] == 200
    assert counts["buffer"] == 12
    assert counts["averaged held-out loss"] == 2


def packed_answers(
    tokens: TokenDataset, folder: Path, weights: tuple[float, ...] = (1,)
) -> RowBatches:
    del tokens
    dataset = some_conversations(folder, weights=weights)
    return conversation_batches(dataset, sequence=96, batch=4, seed=5, packing=True)


def packed_masked_text(tokens: TokenDataset, folder: Path) -> RowBatches:
    train, held_out = beginnings(tokens, train=[200], held_out=120, documents=12, uneven=True)
    write_excerpt(tokens, folder / "short", train=train, held_out=held_out)
    excerpt = open_dataset(folder / "short")
    assert excerpt is not None
    masking = MlmMasking(mask_token=256, vocabulary=256, ignore_index=-100)
    return masked_batches(excerpt, sequence=32, batch=4, seed=5, masking=masking)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gpt-tiny", packed_answers),
        ("llama-tiny", partial(packed_answers, weights=(1, 0.25))),
        ("bert-tiny", packed_masked_text),
    ],
    ids=["answers", "weighted answers", "masked text"],
)
def test_packed_rows_equal_documents_that_are_computed_one_by_one(
    compared: Callable[..., VerificationResult],
    tokens: TokenDataset,
    tmp_path: Path,
    name: str,
    make: Callable[[TokenDataset, Path], RowBatches],
):
    rows = make(tokens, tmp_path)
    counts = rows.target_counts(1)
    assert counts[:2].sum() != counts[2:].sum(), "micro-batches weigh differently"
    assert rows.packing_factor is not None
    assert rows.packing_factor > 1.5
    result = compared(name=name, rows=rows, vocabulary=258, dropout=0.1 * (name != "llama-tiny"))
    assert result.passed, result.first_mismatch


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        ({"learning_rate": 9e-3}, "learning rate"),
        ({"clip": 0.4}, "loss"),
        ({"weight_decay": 0.11}, "loss"),
        ({"betas": (0.9, 0.96)}, "held-out loss"),
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


def two_sources(folder: Path) -> TokenDataset:
    """Texts of two sources, in several documents each."""
    for name, words in (("a", 40), ("b", 70)):
        (folder / name).mkdir()
        for index in range(3):
            text = " ".join(f"{name}{(index * 5 + at) % 17}" for at in range(words))
            (folder / name / f"{index}.txt").write_text(text)
    sources = (str(folder / "a"), str(folder / "b"))
    data = DataRequest(source=sources, tokenizer="byte", held_out=0.3)
    return prepare_dataset(data, cache=folder / "cache")


def some_conversations(folder: Path, *, weights: tuple[float, ...]) -> TokenDataset:
    """Conversations of several lengths, whose answers have weights in turn."""
    rows = []
    for number in range(40):
        answer = {"role": "assistant", "content": "ja " * (number % 7 + 1)}
        answer["weight"] = weights[number % len(weights)]
        rows.append({"messages": [{"role": "user", "content": f"u{number % 5}"}, answer]})
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataRequest(
        source=str(folder / "chat.jsonl"), format="chat", tokenizer="byte", held_out=0.3
    )
    return prepare_dataset(data, cache=folder / "cache")


MASKING = MlmMasking(mask_token=259, vocabulary=257, ignore_index=-100)


def made_pairs(folder: Path, *, packing: bool) -> tuple[RowBatches, PlainRows]:
    dataset = two_sources(folder)
    batches = sentence_pair_batches(
        dataset, sequence=48, batch=30, seed=5, masking=MASKING, packing=packing,
        special=PairTokens(first=258, separator=256, second_offset=260),
    )  # fmt: skip
    form = RowForm(48, 30, 5, None, packing=packing)
    tokens = PlainPairTokens(258, 260)
    return batches, read_plain_pairs(dataset.folder, form, PlainMasking(259, 257), tokens)


def made_masked_text(folder: Path) -> tuple[RowBatches, PlainRows]:
    dataset = two_sources(folder)
    weights = (3.0, 1.0)
    batches = masked_batches(
        dataset, sequence=90, batch=30, seed=5, masking=MASKING, weights=weights
    )
    form = RowForm(90, 30, 5, weights, packing=True)
    return batches, read_plain_masked_text(dataset.folder, form, PlainMasking(259, 257))


def made_answers(
    folder: Path, *, packing: bool, drop_long: bool, weights: tuple[float, ...] = (1,)
) -> tuple[RowBatches, PlainRows]:
    dataset, length = some_conversations(folder, weights=weights), 96 if packing else 40
    batches = conversation_batches(
        dataset, sequence=length, batch=30, seed=5, drop_long=drop_long, packing=packing
    )
    form = RowForm(length, 30, 5, None, packing=packing)
    return batches, read_plain_answers(dataset.folder, form, drop_long=drop_long)


@pytest.mark.parametrize(
    "make",
    [
        partial(made_pairs, packing=False),
        partial(made_pairs, packing=True),
        made_masked_text,
        partial(made_answers, packing=False, drop_long=False),
        partial(made_answers, packing=True, drop_long=True),
        partial(made_answers, packing=True, drop_long=False, weights=(1, 0.25, 0.5)),
    ],
    ids=["pairs", "packed pairs", "masked text", "answers", "packed answers", "weighted answers"],
)
def test_rows_of_documents_are_those_of_the_written_order(
    tmp_path: Path, make: Callable[[Path], tuple[RowBatches, PlainRows]]
) -> None:
    batches, plain = make(tmp_path)
    for step in (1, 2, 9):
        for ours, theirs in zip(batches.samples(step), plain.samples(step), strict=True):
            assert ours.tolist() == theirs.tolist()
        *_, learned = plain.samples(step)
        counts, places = batches.target_counts(step), batches.sequence
        if learned.ndim == 3:
            fractions = learned[:, 1].int().view(torch.float32).sum(dim=1)
            assert counts.tolist() == pytest.approx(fractions.tolist())
        else:
            parts = (learned[:, :places], learned[:, places:])
            expected = torch.stack([(part != -100).sum(dim=1) for part in parts], dim=1)
            kinds = counts.reshape(len(counts), -1).shape[1]
            assert counts.reshape(-1, kinds).tolist() == expected[:, :kinds].tolist()
        ids, apart = batches.document_ids(step, 0, 30), plain.documents(step)
        assert (ids is None) == (apart is None)
        assert ids is None or ids.tolist() == apart.tolist()
    ((inputs, targets),) = batches.held_out_batches(6, 6)
    *expected, nbytes = plain.held_out_samples(6)
    assert [inputs.tolist(), targets.tolist()] == [part.tolist() for part in expected]
    tokens = targets[:, 0] if targets.ndim == 3 else targets[:, : batches.sequence]
    learned = int((tokens != -100).sum())
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
