"""`sample` lets the model of a run write text, or answer what a user says."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from windlass.atomic_files import atomic_write
from windlass.errors import RequestError, shorten
from windlass.inference.language_model import (
    LanguageModel,
    find_checkpoint,
    open_language_model,
)
from windlass.jobs import RUNS, load
from windlass.models import has_config, is_causal, is_huggingface, tokenizer_file
from windlass.schema import CHAT_TEMPLATE_FILE, SAMPLE_FILE, TOKENIZER_FILE, DataRequest
from windlass.tracking import RunRecord
from windlass.training import (
    FIRST_QUESTION,
    Run,
    objects_of_record,
    planned_from_record,
    require_unchanged,
)

if TYPE_CHECKING:
    from torch import nn

    from windlass.data import ChatTemplate

_SAMPLE_TOKENS = 48
_SAMPLE_PROMPT = "def "
"""What a model of the default text, Python's own sources, goes on from."""
_SAMPLE_SHARE = 0.01
"""Share of a run's FLOP that a sample for its page may take."""
_SAMPLE_FLOP = 1e12
"""Most FLOP of such a sample: a few seconds on a CPU."""


def sample(
    run: str | Path,
    prompt: str,
    *,
    root: Path | str = RUNS,
    model: "nn.Module | Callable[..., nn.Module] | None" = None,
    tokens: int = 200,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    chat: bool = False,
    system: str | None = None,
    phases: int = 1,
    ema: bool = False,
) -> Iterator[str]:
    """Yields text that a run's newest good checkpoint generates after a prompt, piece by piece.

    Of temperature, `top_k`, `top_p` and `repetition_penalty`, None is as the
    `generation_config.json` says that the model came with; without one, 0.8, 40 and neither.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        prompt: the beginning of the text, which is not repeated.
        root: the folder that holds the run folders.
        model: the model of a run that was given it as an object.
        tokens: the most tokens to generate.
        temperature: 0 always takes the likeliest token; 1 samples the model's distribution.
        top_k: sample only from this many of the likeliest tokens.
        top_p: sample only from the likeliest tokens that together have this probability.
        repetition_penalty: how much less likely tokens of the text so far become; 1 changes none.
        seed: the same seed generates the same text.
        chat: whether the prompt is what a user says: the run's chat template stands around it, and
            the text is the answer.
        system: with `chat`, the system prompt before it; empty is none, and None that of the run's
            conversations, if most of them have one.
        phases: groups of layers that take turns in memory, for a model that is too large for it;
            1 keeps all layers. The text is the same.
        ema: whether averages of the weights that the run keeps (`train.ema`) write.

    Raises:
        RecordError: no such run, or one of its files has changed.
        RequestError: its model does not predict the next token, or it has no chat template; or
            `phases` is no number of groups, or there is a `system` without `chat`.
        DataError: the run's chat template refuses the prompt.
        CheckpointError: it has no complete checkpoint, or no averages for `ema`.
    """
    if system is not None and not chat:
        raise RequestError("a system prompt belongs to a question; ask it by `--chat`")
    drawing = Drawing(
        tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    if chat:
        with open_dialogue(
            run, drawing, root=root, model=model, system=system, phases=phases, ema=ema
        ) as dialogue:
            yield from dialogue.say(prompt)
        return
    with _writing_model(load(run, root=root), model, phases=phases, ema=ema) as language:
        yield from _continued(language, prompt, drawing)


def _continued(language: LanguageModel, prompt: str, drawing: "Drawing") -> Iterator[str]:
    """What a model writes behind a text, piece by piece."""
    ids = language.tokenizer.encode_prompt(prompt)
    generated = language.generate(ids, **asdict(drawing))
    return language.tokenizer.stream_decode(generated, ids)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How the tokens of texts are drawn; None is as the model's folder says."""

    tokens: int = 200
    """Most tokens of the text."""
    temperature: float | None = None
    """0 always takes the likeliest token; 1 samples the model's distribution. If not given, as
    `generation_config.json` of the model says, or 0.8; likewise the next ones."""
    top_k: int | None = None
    """Sample only from this many of the likeliest tokens; else 40."""
    top_p: float | None = None
    """Sample only from the likeliest tokens that together have this probability; else 1."""
    repetition_penalty: float | None = None
    """How much less likely tokens of the text so far become; else 1."""
    seed: int = 0
    """The same seed generates the same text."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDrawing(Drawing):
    """The same for the answers of a conversation, which may be longer."""

    tokens: int = 500
    """Most tokens of an answer."""


class Dialogue:
    """A conversation with the model of a run, turn by turn.

    Args:
        system: the system prompt; empty is none.
    """

    def __init__(
        self, language: LanguageModel, template: "ChatTemplate", drawing: Drawing, system: str
    ) -> None:
        self._language, self._template, self._drawing = language, template, drawing
        self._opening = [{"role": "system", "content": system}] if system else []
        self._turns = [*self._opening]

    def say(self, message: str) -> Iterator[str]:
        """The model's answer, piece by piece; once it has ended, it is part of what was said.

        Raises:
            DataError: the template refuses the conversation.
            RequestError: the conversation is longer than what the model reads.
        """
        from windlass.data import encode_question

        tokenizer, longest = self._language.tokenizer, self._language.max_sequence
        asked = [*self._turns, {"role": "user", "content": message}]
        ids = encode_question(tokenizer, self._template, asked)
        if longest is not None and len(ids) >= longest:
            raise RequestError(
                f"the conversation has {len(ids):,} tokens, and the model reads {longest:,}; begin "
                "another one (`/new` in `windlass chat`), or say less"
            )
        pieces: list[str] = []
        generated = self._language.generate(ids, **asdict(self._drawing))
        for piece in tokenizer.stream_decode(generated):
            pieces.append(piece)
            yield piece
        self._turns = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def begin(self) -> None:
        """Forgets what was said."""
        self._turns = [*self._opening]


@contextmanager
def open_dialogue(
    run: str | Path,
    drawing: Drawing,
    *,
    root: Path | str = RUNS,
    model: "nn.Module | Callable[..., nn.Module] | None" = None,
    system: str | None = None,
    phases: int = 1,
    ema: bool = False,
) -> Iterator[Dialogue]:
    """A conversation with the newest good checkpoint of a run, while the context is open.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        drawing: how answers are drawn.
        root: the folder that holds the run folders.
        model: the model of a run that was given it as an object.
        system: the system prompt; empty is none, and None that of the run's conversations, if most
            of them have one.
        phases: groups of layers that take turns in memory, for a model that is too large for it.
        ema: whether averages of the weights that the run keeps (`train.ema`) write.

    Raises:
        WindlassError: as `sample`.
    """
    record = load(run, root=root)
    template = _chat_template(record)
    system = usual_system_prompt(record.meta)[0] if system is None else system
    with _writing_model(record, model, phases=phases, ema=ema) as language:
        yield Dialogue(language, template, drawing, system)


@contextmanager
def _writing_model(
    record: RunRecord,
    model: "nn.Module | Callable[..., nn.Module] | None",
    *,
    phases: int,
    ema: bool,
) -> Iterator[LanguageModel]:
    """The model of a run that can write text."""
    planned = planned_from_record(record)
    require_unchanged(record, TOKENIZER_FILE)
    if not is_causal(planned.request.model.name):
        raise RequestError(
            f"`{planned.request.model.name}` predicts masked tokens, not the next one, and cannot "
            "generate text; sample a run of a causal model"
        )
    checkpoint = find_checkpoint(record)
    if not (record.folder / TOKENIZER_FILE).is_file():
        raise RequestError(
            f"run `{record.folder.name}` was trained on token ids and has no tokenizer, so that it "
            "cannot write text"
        )
    objects = objects_of_record(record, model=model)
    with open_language_model(
        record, planned, checkpoint, objects, phases=phases, ema=ema
    ) as language:
        yield language


def usual_system_prompt(meta: Mapping[str, object]) -> tuple[str, str | None]:
    """The system prompt that a run's questions are asked with, and a sentence that says so.

    It is the one that most of its conversations begin with. No sentence stands for conversations
    that begin with the user's message.

    Args:
        meta: what the run's journal says of the run.
    """
    from windlass.data import PromptsMeta

    try:
        prompts = PromptsMeta.model_validate(meta.get("prompts"))
    except ValueError:
        return "", None  # a run on text, or one that is older than this record
    total = prompts.conversations
    if prompts.untemplated > total / 2:
        return "", (
            "the run has learned prompts and completions without a chat template, in which "
            "`--chat` asks; leave `--chat` out to ask as it has learned"
        )
    if prompts.with_system <= total / 2:
        return "", (
            "asked without a system prompt, and the conversations of the run begin with several; "
            "name one by `--system TEXT`"
        )
    if not prompts.system:
        return "", None
    return prompts.system, (
        f"asked with the system prompt of {prompts.with_system:,} of {total:,} conversations: "
        f"{shorten(prompts.system)!r}; `--system TEXT` takes another, `--system ''` none"
    )


def _chat_template(record: RunRecord) -> "ChatTemplate":
    """The template that a run keeps, or that of the Hugging Face folder that it began with."""
    from windlass.data import find_chat_template

    request = planned_from_record(record).request
    model, variables = request.model.name, request.data.chat_template_kwargs
    tokenizer: Path | None = record.folder / TOKENIZER_FILE
    if not (record.folder / CHAT_TEMPLATE_FILE).is_file():
        tokenizer = tokenizer_file(model) if is_huggingface(model) else None
    if tokenizer is None:
        raise RequestError(
            f"run `{record.folder.name}` was not trained on conversations and keeps no chat "
            "template; leave out `--chat`, or train with `data.format=chat`"
        )
    return find_chat_template(str(tokenizer), None, variables=variables)


def write_sample(run: Run) -> str | None:
    """Keeps a short text that the model of a finished run writes, and returns it.

    There is none where it would cost much: if the weights do not stay in device memory, or if the
    passes for it need more than a hundredth of the run's FLOP, or seconds on a CPU. A model of the
    user's own is left alone too, which may be no language model.

    Raises:
        CheckpointError: the run has no complete checkpoint.
        StorageError: the disk is full.
    """
    planned = run.planned
    tokens_passed = _SAMPLE_TOKENS * (_SAMPLE_TOKENS + 1) / 2
    flop = 2 * planned.graph.parameter_count * tokens_passed
    most = _SAMPLE_SHARE * planned.prediction.model_flop * (planned.request.train.steps - run.done)
    name = planned.request.model.name
    writes = has_config(name) and is_causal(name) and planned.objects.is_rebuildable
    writes = writes and (run.folder / TOKENIZER_FILE).is_file()  # none if it was given token ids
    if not writes or planned.plan.is_offloaded("parameters") or flop > min(most, _SAMPLE_FLOP):
        return None
    record = load(run.folder)
    question = record.meta.get(FIRST_QUESTION)
    drawing = Drawing(tokens=_SAMPLE_TOKENS)
    with _writing_model(record, None, phases=1, ema=False) as language:
        tokenizer = language.tokenizer
        if isinstance(question, list) and question:
            # As it learned to answer: in its own template, after its first question.
            generated = language.generate(question, **asdict(drawing))
            asked, pieces = tokenizer.decode(question), tokenizer.stream_decode(generated)
            text = f"{asked.strip()}\n{''.join(pieces)}"
        else:
            is_default = planned.request.data.source == DataRequest().source
            prompt = _SAMPLE_PROMPT if is_default else ""
            text = prompt + "".join(_continued(language, prompt, drawing))
    atomic_write(run.folder / SAMPLE_FILE, text)
    return text
