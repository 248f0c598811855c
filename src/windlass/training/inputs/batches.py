"""The batches of a run: windows of text, packed documents, conversations, or examples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

from windlass.cost import predict_time
from windlass.errors import PlanError, RequestError
from windlass.jobs import Planned, model_arguments
from windlass.models import is_causal, predicts_pairs, runs_by_transformers
from windlass.schema import CHECKPOINT_FOLDER, TrainSettings, is_users_own
from windlass.tracking import RunRecord

if TYPE_CHECKING:
    from windlass.data import (
        Batches,
        ExampleDataset,
        MlmMasking,
        PairTokens,
        RowBatches,
        TokenDataset,
        TrainingBatches,
    )

FIRST_QUESTION = "first_question"
"""Key of a run's record with the ids of its first conversation up to the first answer."""
_MOST_QUESTION = 512
"""Most of them, the last ones."""


@overload
def make_batches(planned: Planned, tokens: "TokenDataset") -> "Batches | RowBatches": ...
@overload
def make_batches(
    planned: Planned, tokens: "TokenDataset | ExampleDataset"
) -> "TrainingBatches": ...
def make_batches(planned: Planned, tokens: "TokenDataset | ExampleDataset") -> "TrainingBatches":
    """The batches of a run, from its tokens.

    Raises:
        DataError: the text is too short, or the conversations have no answer.
        PlanError: conversations for a model that predicts masked tokens, packed text for one that
            does not, or packed rows for a model of the user's own.
    """
    from windlass.data import (
        ExampleBatches,
        ExampleDataset,
        conversation_batches,
        masked_batches,
        sentence_pair_batches,
    )

    settings, data = planned.request.train, planned.request.data
    if planned.plan.parallel.context and (_predicts_pairs(planned) or data.format == "classes"):
        raise PlanError(
            f"`parallel.context` = {planned.plan.parallel.context} cuts a sequence, whose class is "
            "read from its first token; leave out `parallel.context`"
        )
    if isinstance(tokens, ExampleDataset):
        return ExampleBatches(tokens, batch=settings.batch, seed=settings.seed)
    if data.packing:
        _require_packable(planned)
    masking = _masking(planned, tokens)
    if tokens.conversations is not None:
        if masking is not None:
            raise PlanError(
                f"`{planned.request.model.name}` predicts masked tokens, and answers are learned "
                "by models that predict each next token; take one of those, or `data.format=text`"
            )
        return conversation_batches(
            tokens, sequence=planned.plan.batch.sequence, batch=settings.batch,
            seed=settings.seed, weights=data.weights,
            drop_long=data.long_documents == "drop", packing=data.packing,
        )  # fmt: skip
    if masking is not None and _predicts_pairs(planned):
        return sentence_pair_batches(
            tokens, sequence=planned.plan.batch.sequence, batch=settings.batch, seed=settings.seed,
            masking=masking, special=_pair_tokens(planned, tokens), weights=data.weights,
            packing=data.packing,
        )  # fmt: skip
    if masking is None or not data.packing:
        return make_windows(planned, tokens)
    return masked_batches(
        tokens, sequence=planned.plan.batch.sequence, batch=settings.batch, seed=settings.seed,
        masking=masking, weights=data.weights,
    )  # fmt: skip


def make_windows(planned: Planned, tokens: "TokenDataset") -> "Batches":
    """Batches of windows, which take no notice of where documents begin and end.

    Raises:
        DataError: the text is too short.
    """
    from windlass.data import Batches

    settings = planned.request.train
    return Batches(
        tokens, sequence=planned.plan.batch.sequence, batch=settings.batch, seed=settings.seed,
        masking=_masking(planned, tokens), weights=planned.request.data.weights,
    )  # fmt: skip


def with_document_lengths(planned: Planned, batches: "TrainingBatches") -> Planned:
    """The plan with the time that its documents take, whose lengths are known once rows are packed.

    Memory stays that of rows of one document, which no row exceeds.
    """
    from windlass.data import RowBatches

    tokens = batches.document_tokens if isinstance(batches, RowBatches) else None
    if tokens is None:
        return planned
    graph = planned.graph.model_copy(update={"document_tokens": tokens})
    before, steps = planned.prediction, planned.request.train.steps
    prediction = predict_time(planned.plan, graph, planned.machine).model_copy(
        update={"peaks": before.peaks, "compile_seconds": before.compile_seconds}
    )
    seconds = prediction.step_seconds * steps + prediction.compile_seconds
    result = replace(planned.result, prediction=prediction, run_seconds=seconds)
    return replace(planned, graph=graph, result=result)


def data_notes(batches: "TrainingBatches") -> tuple[str, ...]:
    """What is worth knowing of a run's batches, a sentence each."""
    from windlass.data import ExampleBatches, RowBatches

    notes = () if isinstance(batches, ExampleBatches) else batches.tokens.notes
    return (*notes, *batches.notes) if isinstance(batches, RowBatches) else notes


def data_metadata(batches: "TrainingBatches") -> dict[str, object]:
    """What a run keeps of its batches: how full rows are, and how conversations begin."""
    from windlass.data import RowBatches

    if not isinstance(batches, RowBatches):
        return {}
    factor, prompts = batches.packing_factor, batches.tokens.meta.prompts
    kept: dict[str, object] = {} if factor is None else {"packing_factor": factor}
    if prompts is None:
        return kept
    question = batches.tokens.first_question[-_MOST_QUESTION:]
    return kept | {"prompts": prompts.model_dump(), FIRST_QUESTION: question}


def _masking(planned: Planned, tokens: "TokenDataset") -> "MlmMasking | None":
    """How tokens are masked; None for a model that predicts each next token."""
    from windlass.data import MlmMasking
    from windlass.models import IGNORE_INDEX

    if is_causal(planned.request.model.name):
        return None
    mask = tokens.tokenizer.mask_token
    return MlmMasking(
        mask_token=planned.graph.vocabulary - 1 if mask is None else mask,
        vocabulary=tokens.vocabulary,
        ignore_index=IGNORE_INDEX,
    )


def missing_special_tokens(planned: Planned, tokens: "TokenDataset") -> tuple[str, ...]:
    """What a model needs that is no token of its tokenizer, in words; each is an entry more."""
    if is_causal(planned.request.model.name):
        return ()
    mask = "" if tokens.tokenizer.mask_token is not None else "the mask token"
    needs_first = _predicts_pairs(planned) and tokens.tokenizer.class_token is None
    return tuple(filter(None, (mask, "the token before a pair" if needs_first else "")))


def _predicts_pairs(planned: Planned) -> bool:
    model = planned.request.model
    return predicts_pairs(model.name, model_arguments(model))


def _pair_tokens(planned: Planned, tokens: "TokenDataset") -> "PairTokens":
    """The special tokens of pairs, which a tokenizer without them gets behind its own entries."""
    from windlass.data import PairTokens

    vocabulary, first = planned.graph.vocabulary, tokens.tokenizer.class_token
    return PairTokens(
        first=vocabulary - 2 if first is None else first,
        separator=tokens.meta.end_of_text,
        second_offset=vocabulary,
    )


def _require_packable(planned: Planned) -> None:
    """Refuses packed rows where nothing keeps the documents apart."""
    request = planned.request
    name = request.model.name
    if planned.objects.names or is_users_own(name) or runs_by_transformers(name):
        whose = "of transformers" if runs_by_transformers(name) else "of your own"
        raise PlanError(
            f"`data.packing` needs attention that keeps documents apart, and a model {whose} is "
            "called with its input alone; leave `data.packing` out, or take a catalogue model"
        )
    if request.data.format == "text" and is_causal(request.model.name):
        raise PlanError(
            f"`data.packing` of text is for models that predict masked tokens, and "
            f"`{request.model.name}` predicts each next token, of windows that are full already; "
            "leave `data.packing` out, or set `data.format` to `chat`"
        )


def with_skipped_batches(planned: Planned, record: RunRecord, ranges: Sequence[str]) -> Planned:
    """The same run, which takes no batch of some ranges.

    Args:
        ranges: such as `120-125`, in addition to those that it leaves out already.

    Raises:
        RequestError: a text is no range, or a batch was taken already by the newest checkpoint.
    """
    from windlass.data import batch_of_step
    from windlass.runtime import latest_checkpoint

    train = planned.request.train
    checkpoint = latest_checkpoint(record.folder / CHECKPOINT_FOLDER)
    done = checkpoint.manifest.step if checkpoint else 0
    taken = batch_of_step(done, train.skip_batches) if done else 0
    content = train.model_dump(exclude_none=True)
    content["skip_batches"] = (*(train.skip_batches or ()), *ranges)
    try:
        settings = TrainSettings.model_validate(content)
    except ValueError as error:
        raise RequestError(
            f"`--skip-batches {' '.join(ranges)}`: write a batch, or the first and the last one of "
            "some, such as `120-125`"
        ) from error
    late = [text for text in ranges if int(text.partition("-")[0]) <= taken]
    if late:
        raise RequestError(
            f"`--skip-batches {late[0]}`: run `{record.folder.name}` has taken batch {taken} at "
            f"step {done}, its newest checkpoint; start a new run from an earlier one with "
            f"`windlass train --from {record.folder}@STEP --continue train.skip_batches={late[0]}`"
        )
    return replace(planned, request=planned.request.model_copy(update={"train": settings}))
