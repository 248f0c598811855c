"""The model of a run with its tokenizer, loaded from any of its checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.atomic_files import scratch_folder
from windlass.document import read_json_object
from windlass.errors import CheckpointError, RequestError
from windlass.jobs import NO_OBJECTS, RUNS, Planned, PlannedObjects, load
from windlass.models import is_causal
from windlass.schema import (
    CHECKPOINT_FOLDER,
    GENERATION_CONFIG_FILE,
    MERGED_CHECKPOINT_FOLDER,
    MODEL_CONFIG_FILE,
    TOKENIZER_FILE,
)
from windlass.tracking import RunRecord
from windlass.training import planned_from_record, request_at_step, require_unchanged

if TYPE_CHECKING:
    from windlass.data import ChoiceLikelihood, EncodedChoice, Tokenizer
    from windlass.runtime import Checkpoint, InferenceModel

_TEMPERATURE, _TOP_K = 0.8, 40
"""Those of a model whose folder says nothing."""
_LIBRARY_TOP_K = 50
"""Default of transformers where a folder says that tokens are drawn, and not from how many."""
_LIBRARY_KEYS = frozenset(
    {"no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "min_p", "typical_p",
     "epsilon_cutoff", "eta_cutoff"}
)  # fmt: skip
_OTHER_TEXT = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": 0.0, "guidance_scale": 1.0,
    "dola_layers": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "force_words_ids": None, "constraints": None,
    "begin_suppress_tokens": None, "min_length": 0, "min_new_tokens": 0, "sequence_bias": None,
    "watermarking_config": None, "stop_strings": None, "top_h": None,
}  # fmt: skip
"""Keys that make another text and are not computed here, with the value that leaves each out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How tokens are drawn unless a command says otherwise, and where a text ends."""

    temperature: float = _TEMPERATURE
    top_k: int | None = _TOP_K
    top_p: float | None = None
    repetition_penalty: float = 1.0
    library: Mapping[str, Any] = field(default_factory=dict)
    """Keys that transformers computes (`Any`: JSON)."""
    end_tokens: frozenset[int] = frozenset()
    """None if neither file of the folder names one."""


def generation_config(folder: Path) -> GenerationConfig:
    """What a run folder says, in its copies of `generation_config.json` and `config.json`.

    Temperature and the like count where the folder says that tokens are drawn (`do_sample`); one
    that says that they are not takes the likeliest token.

    Raises:
        RequestError: the file cannot be read, or asks for a text that is written in another way.
    """
    settings, config = (
        read_json_object(path, RequestError) if (path := folder / name).is_file() else {}
        for name in (GENERATION_CONFIG_FILE, MODEL_CONFIG_FILE)
    )
    for key, value in _OTHER_TEXT.items():
        if settings.get(key) not in (None, value):
            raise RequestError(
                f"`{folder / GENERATION_CONFIG_FILE}` asks for `{key}` = {settings[key]!r}, which "
                "is not computed here; export the model (`windlass export RUN --to hf:DIR`), and "
                "let transformers write"
            )
    ends = settings.get("eos_token_id", config.get("eos_token_id"))
    end_tokens = frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))
    if not all(type(token) is int for token in end_tokens):
        raise RequestError(f"`eos_token_id` of `{folder}` is no token id: {ends!r}")
    always = GenerationConfig(
        repetition_penalty=settings.get("repetition_penalty") or 1.0,
        library={key: settings[key] for key in _LIBRARY_KEYS & settings.keys()},
        end_tokens=end_tokens,
    )
    draws = settings.get("do_sample")
    if draws is None:
        return always
    return replace(
        always,
        temperature=_value(settings, "temperature", 1.0) if draws else 0.0,
        top_k=_value(settings, "top_k", _LIBRARY_TOP_K) or None,
        top_p=_value(settings, "top_p", None),
    )


def _value(settings: Mapping[str, Any], key: str, default: Any) -> Any:  # noqa: ANN401  JSON
    value = settings.get(key)
    return default if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A causal model in memory, in float32, and the tokenizer that it was trained with."""

    folder: Path
    """The run's."""
    step: int
    """The step of the checkpoint."""
    model: "InferenceModel"
    tokenizer: "Tokenizer"

    @property
    def generation(self) -> GenerationConfig:
        """How the model's folder says that it writes.

        Raises:
            RequestError: the file cannot be read, or asks for what is not computed.
        """
        return generation_config(self.folder)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Those of its folder, and once it was trained, the one that ended the texts of its data.

        Raises:
            RequestError: as `generation`.
        """
        ends = self.generation.end_tokens
        trained = {self.tokenizer.end_of_text} if self.step or not ends else set[int]()
        return ends | trained

    @property
    def max_sequence(self) -> int | None:
        """Longest sequence that it reads; None if it sets no limit."""
        return self.model.max_sequence

    def log_likelihoods(self, choices: "Sequence[EncodedChoice]") -> "list[ChoiceLikelihood]":
        """How likely it finds each choice behind its context.

        Args:
            choices: at least one token each, and one before it.

        Raises:
            ValueError: a choice has no token, or more than the model reads.
        """
        from windlass.runtime import log_likelihoods

        return log_likelihoods(self.model, choices)

    def generate(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int = 0,
    ) -> Iterator[int]:
        """Tokens that it writes behind a prompt, up to an end of text.

        What is None is as the `generation_config.json` of the model's folder says.

        Args:
            prompt: at least one token.
            tokens: most tokens to write.
            temperature: 0 always takes the likeliest token; 1 samples the model's distribution.
            top_k: sample only from this many of the likeliest tokens.
            top_p: sample only from the likeliest tokens that together have this probability.
            repetition_penalty: how much less likely tokens of the text so far become.
            seed: the same seed writes the same tokens.

        Raises:
            ValueError: the prompt has no token.
            RequestError: the folder asks for a text that is written in another way.
            InputErrors: nothing can be drawn with what is asked for.
        """
        from windlass.runtime import SamplingOptions, generate_text

        settings = self.generation
        asked: dict[str, Any] = {  # the types of the options of that name
            "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "repetition_penalty": repetition_penalty,
        }  # fmt: skip
        drawn = {
            name: getattr(settings, name) if value is None else value
            for name, value in asked.items()
        }
        options = SamplingOptions(
            count=tokens, seed=seed, library=settings.library, end_tokens=self.end_tokens, **drawn
        )
        return generate_text(self.model, prompt, options)


def load_language_model(
    run: str | Path, *, step: int | None = None, root: Path | str = RUNS
) -> LanguageModel:
    """Loads the model of a run.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        step: step of the checkpoint; None means the newest good one.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or one of its files has changed.
        RequestError: its model does not predict the next token, or it has no tokenizer.
        CheckpointError: it has no such checkpoint, or none that is whole.
    """
    record, planned, checkpoint = find_language_model(run, step=step, root=root)
    # What a checkpoint is merged into is read once: all layers stay in memory.
    with scratch_folder(record.folder) as folder:
        return _read_model(record, planned, checkpoint, NO_OBJECTS, folder)


def find_language_model(
    run: str | Path, *, step: int | None, root: Path | str
) -> "tuple[RunRecord, Planned, Checkpoint]":
    """A run whose model predicts the next token of a text, what it was made from, and a checkpoint.

    Arguments and errors are those of `load_language_model`.
    """
    record = load(run, root=root)
    planned = planned_from_record(record)
    require_unchanged(record, TOKENIZER_FILE)
    _require_language_model(record, planned.request.model.name)
    return record, planned, find_checkpoint(record, step)


@contextmanager
def open_language_model(
    record: RunRecord,
    planned: Planned,
    checkpoint: "Checkpoint",
    objects: PlannedObjects,
    *,
    phases: int = 1,
    ema: bool = False,
) -> Iterator[LanguageModel]:
    """The model of a checkpoint of a run, while the context is open.

    Args:
        phases: groups of layers that take turns in memory; 1 loads all of them.
        ema: whether averages that are kept beside the weights are meant.

    Raises:
        RequestError: `phases` is no number of groups.
        CheckpointError: the checkpoint belongs to another model, or has no averages.
    """
    if phases < 1:
        raise RequestError(f"`phases` = {phases}; write 1 to keep all layers in memory, or more")
    with scratch_folder(record.folder) as folder:
        yield _read_model(record, planned, checkpoint, objects, folder, phases=phases, ema=ema)


def _read_model(
    record: RunRecord,
    planned: Planned,
    checkpoint: "Checkpoint",
    objects: PlannedObjects,
    folder: Path,
    *,
    phases: int = 1,
    ema: bool = False,
) -> LanguageModel:
    """The model of a checkpoint; with several phases it reads its layers from `folder` later."""
    from windlass.data import load_tokenizer
    from windlass.runtime import InferenceModel, evaluation_checkpoint

    # Another leg of the run had layers of other shapes.
    request = request_at_step(planned.request, checkpoint.manifest.step)
    stack = objects.stack(request.model_identity, seed=None)
    merged = evaluation_checkpoint(checkpoint, stack, folder / MERGED_CHECKPOINT_FOLDER, ema=ema)
    return LanguageModel(
        folder=record.folder,
        step=checkpoint.manifest.step,
        model=InferenceModel(stack, merged, phases=phases),
        tokenizer=load_tokenizer(record.folder / TOKENIZER_FILE),
    )


def _require_language_model(record: RunRecord, model: str) -> None:
    """Refuses a run whose model cannot say how likely a text is."""
    run = f"run `{record.folder.name}`"
    if not is_causal(model):
        raise RequestError(
            f"`{model}` predicts masked tokens, not the next one; score a run of a causal model"
        )
    if record.meta.get("objects"):
        raise RequestError(
            f"{run} was given its model as an object, which no file holds, so that it cannot be "
            "scored; put the function that builds it into a file that is imported"
        )
    if not (record.folder / TOKENIZER_FILE).is_file():
        raise RequestError(
            f"{run} was trained on token ids and has no tokenizer, so that it cannot read a task"
        )


def find_checkpoint(record: RunRecord, step: int | None = None) -> "Checkpoint":
    """A checkpoint of a run, which stays while it is referred to.

    Args:
        step: its step; None means the newest good one.

    Raises:
        CheckpointError: there is no such checkpoint, or none that is whole.
    """
    from windlass.runtime import hold_checkpoint, latest_checkpoint

    folder = record.folder / CHECKPOINT_FOLDER
    if step is None:
        newest = latest_checkpoint(folder, holds=True)
        if newest is None:
            raise CheckpointError(f"run `{record.folder.name}` has saved no checkpoint yet")
        return newest
    checkpoint = hold_checkpoint(folder, step)
    if checkpoint is None:
        raise CheckpointError(f"run `{record.folder.name}` keeps no checkpoint of step {step}")
    return checkpoint
