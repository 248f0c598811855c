"""`export` writes the weights of a run as a file or a folder, and its masks as another file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from rich.console import RenderableType

from windlass.answer import Answer
from windlass.atomic_files import scratch_folder
from windlass.errors import CheckpointError, RequestError, did_you_mean
from windlass.flags import AnyPath, Flag, Live, RunsFolder, Word
from windlass.jobs import RUNS, exported_config, load, special_tokens
from windlass.models import (
    ResNetConfig,
    TransformerConfig,
    has_config,
    is_residual,
    runs_by_transformers,
)
from windlass.schema import (
    CHAT_TEMPLATE_FILE,
    CHECKPOINT_FOLDER,
    EXAMPLES_FILE,
    MERGED_CHECKPOINT_FOLDER,
    TOKENIZER_FILE,
    ModelIdentity,
)
from windlass.tracking import require_no_links
from windlass.training.legs import request_at_step
from windlass.training.resumed_run import objects_of_record
from windlass.training.run_files import planned_from_record

if TYPE_CHECKING:
    from windlass.models import ExportLayout, LayerStack
    from windlass.runtime import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFiles(Answer):
    """What `export` wrote."""

    step: int
    """Updates that the weights have had."""
    weights: Path | None
    masks: Path | None
    sparse_layers: int
    """Layers of which `masks` holds a mask."""

    def lines(self) -> Iterator[RenderableType]:
        """A line for each file."""
        if self.weights is not None:
            yield f"weights  {self.weights}, after step {self.step}"
        if self.masks is not None:
            yield f"masks    {self.masks}, of {self.sparse_layers} layers"


def export(
    run: str | Path = "last",
    *,
    to: Annotated[str | Path | None, Word] = None,
    masks: AnyPath | None = None,
    ema: Flag = False,
    root: RunsFolder = RUNS,
    model: Live = None,
) -> ExportedFiles:
    """Write the weights of a run, in full: absent ones are zeros, adapters are merged.

    For example: `windlass export last --to hf:my-model`, or `windlass export last --to
    weights.safetensors --masks masks.safetensors`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        to: `hf:DIR` for a Hugging Face folder, `gguf:FILE` for llama.cpp, `peft:DIR` for the
            adapters alone (`hf`, `gguf` and `peft` make them in the run folder), or one
            safetensors file.
        masks: The file of the masks of a sparse model, which `sparsity.mask=FILE` starts from.
        ema: Write the averages of the weights that a run with `train.ema` keeps.
        root: The folder that holds the run folders.
        model: The model of a run that was given it as an object.

    Raises:
        RequestError: no file is named, or the model was an object that is not given here.
        RecordError: no such run, or one of its files has changed or is a link.
        CheckpointError: it has no complete checkpoint, no sparse layer for `masks`, or no averages
            for `ema`.
        ModelError: Hugging Face has no such model.
        StorageError: a file cannot be written.
    """
    from windlass.runtime import evaluation_checkpoint, export_masks, latest_checkpoint

    if to is None and masks is None:
        raise RequestError(
            "name what to write: `--to hf:DIR`, `--to FILE` or `--masks FILE`; "
            "`windlass export --help` lists all"
        )
    record = load(run, root=root)
    require_no_links(record.folder)
    planned = planned_from_record(record)
    checkpoint = latest_checkpoint(record.folder / CHECKPOINT_FOLDER, holds=True)
    if checkpoint is None:
        raise CheckpointError(f"run `{record.folder.name}` has saved no checkpoint yet")
    identity = request_at_step(planned.request, checkpoint.manifest.step).model_identity
    stack = objects_of_record(record, model=model).stack(identity, seed=None)
    masks_file = None if masks is None else Path(masks)
    target = None if to is None else _target(str(to), record.folder, checkpoint.manifest.step)
    layers = 0
    with scratch_folder(record.folder) as folder:
        into = folder / MERGED_CHECKPOINT_FOLDER
        merged = evaluation_checkpoint(checkpoint, stack, into, ema=ema)
        if masks_file is not None:
            layers = export_masks(merged, stack, masks_file)
        if target is not None:
            _write(target, merged, stack, identity, record.folder)
    return ExportedFiles(
        step=checkpoint.manifest.step,
        weights=target and target.path,
        masks=masks_file,
        sparse_layers=layers,
    )


class _Target(NamedTuple):
    format: Literal["safetensors", "hf", "gguf", "peft"]
    path: Path


def _target(to: str, run: Path, step: int) -> _Target:
    """What `--to` names: a format, a format and a place, or a safetensors file."""
    name, colon, place = to.partition(":")
    if name == "hf" and (place or not colon):
        return _Target("hf", Path(place).expanduser() if place else run / f"hf-step-{step}")
    if name == "peft" and (place or not colon):
        return _Target("peft", Path(place).expanduser() if place else run / f"peft-step-{step}")
    if name == "gguf" and (place or not colon):
        return _Target("gguf", Path(place).expanduser() if place else run / f"step-{step}.gguf")
    if colon and name.isalnum() and "/" not in to:
        raise RequestError(
            f"`--to {to}`: no format `{name}`{did_you_mean(name, ('hf', 'gguf', 'peft'))}; write "
            f"`hf:DIR`, `gguf:FILE` or `peft:DIR`, or `./{to}` for a file of that name"
        )
    return _Target("safetensors", Path(to))


def _write(
    target: _Target,
    checkpoint: "Checkpoint",
    stack: "LayerStack",
    identity: ModelIdentity,
    run: Path,
) -> None:
    """Writes the weights of a checkpoint of a run in one format."""
    from windlass.models import export_layout, transformers_layout
    from windlass.runtime import export_huggingface, export_weights

    if target.format == "safetensors":
        export_weights(checkpoint, stack, target.path)
        return
    tokenizer = run / TOKENIZER_FILE if (run / TOKENIZER_FILE).is_file() else None
    by_transformers = runs_by_transformers(identity.name)
    if not (by_transformers or has_config(identity.name) or is_residual(identity.name)):
        raise RequestError(
            f"`{identity.name}` is a model of your own, which `transformers` does not know; export "
            "it as one file (`--to FILE.safetensors`)"
        )
    if target.format == "peft":
        _write_adapter(target.path, checkpoint, stack, identity)
        return
    if by_transformers:
        if target.format == "gguf":
            raise RequestError(
                f"`{identity.name}` runs by the code of transformers, and is written by `--to "
                "hf:DIR` or `--to peft:DIR`, not as `gguf`"
            )
        of_transformers = transformers_layout(
            identity.name,
            stack,
            tokenizer=tokenizer,
            special_tokens=special_tokens(identity.name, tokenizer),
        )
        export_huggingface(checkpoint, stack, of_transformers, target.path)
        return
    config = exported_config(identity)
    template = run / CHAT_TEMPLATE_FILE
    layout = export_layout(
        config, stack.tied_weights, tokenizer=tokenizer,
        special_tokens=special_tokens(identity.name, tokenizer),
        chat_template=template.read_bytes() if template.is_file() else None,
        classes=_learned_classes(run, config),
    )  # fmt: skip
    if target.format == "hf":
        export_huggingface(checkpoint, stack, layout, target.path)
    else:
        _write_gguf(target.path, checkpoint, stack, layout)


def _write_adapter(
    path: Path, checkpoint: "Checkpoint", stack: "LayerStack", identity: ModelIdentity
) -> None:
    """Writes the adapters of a checkpoint alone."""
    from windlass.models import peft_adapter
    from windlass.runtime import export_adapter

    config = None if runs_by_transformers(identity.name) else exported_config(identity)
    if identity.lora is None or isinstance(config, ResNetConfig):
        raise RequestError(
            "the run trained no adapter (`lora.rank`); export its weights by `--to hf:DIR`"
        )
    adapter = peft_adapter(config, stack, identity.lora)
    export_adapter(checkpoint, stack, adapter, path)


def _learned_classes(
    run: Path, config: TransformerConfig | ResNetConfig
) -> tuple[str, ...] | None:  # fmt: skip
    """Names of the classes of texts that a run learned; None if it learned none."""
    from windlass.data import load_examples

    if isinstance(config, ResNetConfig) or config.text_classes is None:
        return None
    examples = load_examples(run / EXAMPLES_FILE)
    return None if examples is None else examples.classes


def _write_gguf(
    path: Path, checkpoint: "Checkpoint", stack: "LayerStack", layout: "ExportLayout"
) -> None:
    """Writes a GGUF file with the tokens, the end of a text and the chat template of a model."""
    from windlass.models import gguf_layout, gguf_vocabulary
    from windlass.runtime import export_gguf

    vocabulary = gguf_vocabulary(layout.files, layout.names.transformer.vocabulary)
    export_gguf(checkpoint, stack, gguf_layout(layout), vocabulary, path)
