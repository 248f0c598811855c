"""Whether the data of a run fit its model: entries of the vocabulary, shapes and targets."""

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import DataError, PlanError
from windlass.jobs import IN_MEMORY, Planned, model_arguments
from windlass.models import (
    apply_model_arguments,
    has_config,
    is_huggingface,
    is_pretrained,
    model_config,
)
from windlass.schema import BYTE_ENTRIES, DataRequest
from windlass.training.inputs.batches import missing_special_tokens

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, TokenDataset


def require_vocabulary(planned: Planned, tokens: "TokenDataset | ExampleDataset") -> None:
    """Refuses a model whose vocabulary is smaller than the tokenizer's.

    A model that predicts masked tokens needs more entries, for special tokens.

    Raises:
        PlanError: the model's vocabulary is too small.
    """
    from windlass.data import ExampleDataset

    if isinstance(tokens, ExampleDataset):
        if planned.request.data.format == "classes":
            _require_classes(planned, tokens)
            return
        _require_shape(planned, tokens)
        if tokens.vocabulary > planned.graph.vocabulary:
            if not tokens.has_tokens:
                way_out = f"set `model.classes={tokens.vocabulary}`"
                if is_pretrained(planned.request.model.name):
                    way_out = "its weights are of these; take data of its own classes"
                raise PlanError(
                    f"the data have {tokens.vocabulary} classes, and the model "
                    f"{planned.graph.vocabulary}; {way_out}"
                )
            raise PlanError(
                f"the data have token ids up to {tokens.vocabulary - 1}, and the model has "
                f"{planned.graph.vocabulary} entries; give it a larger vocabulary"
            )
        return
    special = missing_special_tokens(planned, tokens)
    if tokens.vocabulary + len(special) > planned.graph.vocabulary:
        mask = f" and needs more for {' and '.join(special)}" if special else ""
        raise PlanError(
            f"the tokenizer has {tokens.vocabulary} entries{mask}, and the model has only "
            f"{planned.graph.vocabulary}; {_way_out(planned, tokens.vocabulary, len(special))}"
        )


def describe_misfit(planned: Planned) -> str | None:
    """Why a run of a plan would be refused for its tokenizer, as far as that is known before.

    Returns:
        A sentence; None if the tokenizer fits or is not known yet.
    """
    data, most = planned.request.data, planned.graph.vocabulary
    if planned.objects.examples is not None or planned.graph.examples is not None:
        return None
    if data.source == IN_MEMORY or data.format in ("images", "classes"):
        return None
    entries, about = _entries(data), "up to " if data.tokenizer == "bpe" else ""
    if entries is None or entries <= most:
        return None
    return (
        f"the tokenizer has {about}{entries:,} entries, and the model has only {most:,}, so that "
        f"`train` would refuse it; {_way_out(planned, entries, 0)}"
    )


def _entries(data: DataRequest) -> int | None:
    """Entries of the tokenizer that a request names; None if it cannot be read."""
    if data.tokenizer == "bpe":
        return data.vocabulary
    if data.tokenizer == "byte":
        return min(data.vocabulary, BYTE_ENTRIES + 1)
    from windlass.data import load_tokenizer

    try:
        return load_tokenizer(Path(data.tokenizer).expanduser()).vocabulary
    except DataError:
        return None


def _way_out(planned: Planned, entries: int, special: int) -> str:
    """What makes a tokenizer and a model agree: a larger model, or a smaller tokenizer.

    Args:
        special: entries that the model needs beside these.
    """
    name, data = planned.request.model.name, planned.request.data
    room = planned.graph.vocabulary - special
    if is_huggingface(name):
        return "name the tokenizer that belongs to the model as `data.tokenizer`"
    wanted = entries + special
    larger = f"raise `model.vocabulary` to {wanted}"
    if not has_config(name):
        larger = f"give the model at least {wanted} entries"
    if room < BYTE_ENTRIES:
        return f"{larger}; no tokenizer has fewer than {BYTE_ENTRIES}, one for each byte"
    tokenizer = "" if data.tokenizer in ("bpe", "byte") else "`data.tokenizer=bpe` and "
    return f"{larger}, or set {tokenizer}`data.vocabulary={room}`"


def _require_classes(planned: Planned, texts: "ExampleDataset") -> None:
    """Refuses texts of another number of classes, or of more tokens, than the model takes."""
    model = planned.request.model
    config = apply_model_arguments(model_config(model.name), model_arguments(model))
    found, known = len(texts.classes or ()), config.text_classes or 0
    if found != known:
        raise PlanError(
            f"the data have {found} classes, and the model {known}; set `model.classes={found}`"
        )
    if texts.tokenizer is None:
        return
    added = 2 if texts.tokenizer.class_token is None else 0
    if texts.tokenizer.vocabulary + added > config.vocabulary:
        more = f" and needs {added} more, for special tokens" if added else ""
        raise PlanError(
            f"the tokenizer has {texts.tokenizer.vocabulary} entries{more}, and the model has only "
            f"{config.vocabulary}; {_way_out(planned, texts.tokenizer.vocabulary, added)}"
        )


def _require_shape(planned: Planned, data: "ExampleDataset") -> None:
    """Refuses examples that the model does not take."""
    examples = planned.graph.examples
    if examples is None:
        if not data.has_tokens:
            raise PlanError(
                f"the data have inputs of {list(data.shape)}, and `{planned.graph.name}` takes "
                f"tokens; set `model.input_shape={list(data.shape)}`".replace(", ", ",")
            )
        return
    if data.shape != examples.inputs or data.has_tokens:
        raise PlanError(
            f"the data have inputs of {list(data.shape)}, and `{planned.graph.name}` takes "
            f"{list(examples.inputs)}; name other data as `data.source`, or set "
            "`model.input_shape`"
        )
    has_numbers = examples.numbers is not None
    if data.has_classes is has_numbers or examples.numbers not in (None, data.vocabulary):
        wanted = f"{examples.numbers} numbers" if has_numbers else "one class"
        targets = "one class" if data.has_classes else f"{data.vocabulary} numbers"
        raise PlanError(
            f"each example of the data has {targets} as its target, and `{planned.graph.name}` "
            f"predicts {wanted}; set `model.predicts`, or change the model's last layer"
        )
