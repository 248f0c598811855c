"""Starts a run from a checkpoint of another one, its parent.

The new run gets the parent's checkpoint as one of its own, as if it had saved it. So ranks, resume
and sampling need not know of the parent, which may be deleted.
"""

import shutil
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import CheckpointError, InputErrors, PlanError, RecordError, RequestError
from windlass.jobs import RUNS, Planned, load
from windlass.models import is_adapter
from windlass.schema import (
    CHECKPOINT_FOLDER,
    CONVERTED_CHECKPOINT_FOLDER,
    GRAPH_FILE,
    MERGED_CHECKPOINT_FOLDER,
    REQUEST_FILE,
    TOKENIZER_FILE,
    DataRequest,
    Graph,
    Request,
    ResolvedRequest,
    Step,
)
from windlass.tracking import RunRecord
from windlass.training.run_files import refuse_other_runs, require_unchanged

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, TokenDataset
    from windlass.runtime import Checkpoint


_DATA_KEYS = ("sequence", "batch", "steps")
"""Keys of `train` that follow from the data in fine-tuning."""


_RATE_KEYS = ("steps", "learning_rate", "schedule", "warmup", "decay", "final_rate")
_CONTINUOUS_FACTOR = 1.25
"""Largest factor between the learning rates of two steps in turn that is no jump, but for the first
steps of a warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRun:
    """The run that another one starts from, and how."""

    record: RunRecord
    checkpoint: "Checkpoint"
    """What the new run starts from."""
    continues: bool = False
    """Whether the new run goes on with the parent's steps, data order and learning rates."""

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.record.folder.name

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.checkpoint.manifest.step

    def is_base_of(self, planned: Planned) -> bool:
        """Whether a run trains new adapters beside the weights of this one."""
        old = self.record.request
        return planned.request.lora is not None and old is not None and old.lora is None

    @property
    def metadata(self) -> dict[str, object]:
        """What the journal of the new run records."""
        return {
            "id": self.record.id,
            "name": self.name,
            "step": self.step,
            "checkpoint": self.checkpoint.manifest.checksum[:12],
            "continues": self.continues,
        }


def find_parent(run: str | Path, *, root: Path | str = RUNS, continues: bool = False) -> ParentRun:
    """A run to start another one from.

    Args:
        run: folder, name, the first characters of its id, or `last`; with `@STEP` behind it for
            another checkpoint than the newest good one.
        root: the folder that holds the run folders.
        continues: whether the new run goes on with the parent's steps.

    Raises:
        RecordError: no such run, or one of its files has changed.
        CheckpointError: it has no such checkpoint, or none that is whole.
    """
    from windlass.runtime import hold_checkpoint, latest_checkpoint

    name, at, step = str(run).rpartition("@")
    if not (at and step.isdigit()):
        name, step = str(run), ""
    record = load(name, root=root)
    refuse_other_runs(record)
    require_unchanged(record, REQUEST_FILE, GRAPH_FILE, TOKENIZER_FILE)
    folder = record.folder / CHECKPOINT_FOLDER
    if step:
        checkpoint = hold_checkpoint(folder, int(step))
    else:
        checkpoint = latest_checkpoint(folder, holds=True)
    if checkpoint is None:
        raise CheckpointError(_no_checkpoint(record, step))
    return ParentRun(record=record, checkpoint=checkpoint, continues=continues)


def request_of_child(
    request: Request, parent: ParentRun, given: Collection[str]
) -> tuple[Request, bool]:
    """The request of a run with a parent, and whether it fine-tunes the parent's weights.

    With adapters of its own, or other data, its batch, sequence and steps follow from its data, not
    from the parent's; adapters have learning rates of their own, too.

    Args:
        request: the parent's, with the changes that are asked for.
        parent: the run to start from.
        given: keys of these changes, such as `train.steps`.
    """
    old = parent.record.request
    if old is None or parent.continues:
        return request, False
    has_new_adapters = request.lora is not None and old.lora is None
    if request.data == old.data and not has_new_adapters:
        return request, False
    keys = (*_DATA_KEYS, "learning_rate") if has_new_adapters else _DATA_KEYS
    train = {key: None for key in keys if f"train.{key}" not in given}
    return request.model_copy(
        update={
            "train": request.train.model_copy(update=train),
            "data": _with_tokenizer_of_parent(request.data, parent),
        }
    ), True


def plan_of_child(planned: Planned, parent: ParentRun) -> Planned:
    """What a run with a parent runs: with other data, it keeps its parent's tokenizer.

    Raises:
        PlanError: the model has other weights than the parent's.
        InputErrors: everything that keeps the run from going on with the parent's steps.
    """
    old, graph = parent.record.request, parent.record.graph
    if old is None or graph is None:
        why = "; ".join(parent.record.faults) or "files are missing"
        raise RecordError(f"run `{parent.name}` cannot be a parent: {why}")
    planned = beside_weights_of(parent, planned) if parent.is_base_of(planned) else planned
    request = planned.request
    if difference := _other_weights(graph, planned.graph, adapted=parent.is_base_of(planned)):
        raise PlanError(
            f"run `{parent.name}` trained a model with other weights: {difference}; leave out what "
            "changes the model's shape"
        )
    if parent.continues and (faults := list(_breaks_in_order(parent, request))):
        faults[-1] += "; keep the parent's, or leave out `--continue` for steps of its own"
        raise InputErrors(faults)
    data = _with_tokenizer_of_parent(request.data, parent)
    return replace(
        planned,
        request=request.model_copy(update={"data": data}),
        notes=(
            *planned.notes,
            *parent.checkpoint.damaged,
            _note(parent, request, adapted=parent.is_base_of(planned)),
        ),
    )


def _with_tokenizer_of_parent(data: DataRequest, parent: ParentRun) -> DataRequest:
    """The data, read with the tokenizer that a parent has trained if they are others than its."""
    old = parent.record.request
    if old is None or data == old.data or not data.tokenizer == old.data.tokenizer == "bpe":
        return data
    tokenizer = str((parent.record.folder / TOKENIZER_FILE).absolute())
    return data.model_copy(update={"tokenizer": tokenizer})


def beside_weights_of(parent: ParentRun, planned: Planned) -> Planned:
    """What a run runs whose adapters stand beside the weights of its parent.

    Raises:
        RequestError: it should go on with the parent's steps, which were those of all weights.
    """
    request, result = planned.request, planned.result
    if parent.continues:
        raise RequestError(
            f"`--continue` with adapters beside run `{parent.name}`, whose steps trained all "
            "weights; leave `--continue` out"
        )
    base = str(parent.checkpoint.path.absolute())
    lora = request.lora and request.lora.model_copy(update={"base": base})
    request = request.model_copy(update={"lora": lora})
    if result.plan is not None:
        model = {"model": request.model_identity}
        result = replace(result, plan=result.plan.model_copy(update=model))
    return replace(planned, request=request, result=result)


def require_tokens_of_parent(parent: ParentRun, tokens: "TokenDataset | ExampleDataset") -> None:
    """Refuses text that is tokenized in another way than the parent's, or that continues it badly.

    Raises:
        RequestError: the tokenizer is another one, or a continued text has changed.
    """
    from windlass.data import ExampleDataset, load_tokenizer

    path = parent.record.folder / TOKENIZER_FILE
    if isinstance(tokens, ExampleDataset) or not path.is_file():
        tokenized_alike = True  # whoever passes token ids knows what they mean
    else:
        theirs = load_tokenizer(path).backend.to_str()
        tokenized_alike = theirs == tokens.tokenizer.backend.to_str()
    if not tokenized_alike:
        raise RequestError(
            f"the tokenizer is not that of run `{parent.name}`, whose weights know no other; set "
            f"`data.tokenizer={path}`"
        )
    if parent.continues and tokens.fingerprint != parent.record.meta.get("tokens"):
        raise RequestError(
            f"the text has changed since run `{parent.name}`, whose position in it `--continue` "
            "would keep; leave `--continue` out"
        )


def link_to_parent(parent: ParentRun | None, planned: Planned, folder: Path) -> None:
    """Gives a new run its parent's checkpoint as its own first one.

    It gets none if its adapters stand beside the parent's weights, which are read at its beginning.

    Args:
        parent: the run to start from; None gives none.
    """
    from windlass.runtime import Manifest, link_checkpoint

    if parent is None or parent.is_base_of(planned):
        return
    step, train = _first_step(parent), planned.request.train
    manifest = Manifest(
        step=step, samples=step * train.batch, seed=train.seed, plan=planned.plan.label,
        graph=planned.plan.graph, files={}, averaging=parent.checkpoint.manifest.averaging,
    )  # fmt: skip
    link_checkpoint(parent.checkpoint, folder / CHECKPOINT_FOLDER, manifest)
    if parent.checkpoint.hold is not None:
        parent.checkpoint.hold.release()


def start_from_parent(
    parent: ParentRun | None, planned: Planned, folder: Path
) -> "Checkpoint | None":
    """What a new run starts from: what `link_to_parent` has given it, shards merged."""
    from windlass.runtime import checkpoint_name, open_checkpoint

    if parent is None or parent.is_base_of(planned):
        return None
    path = folder / CHECKPOINT_FOLDER / checkpoint_name(_first_step(parent))
    return with_whole_layers(open_checkpoint(path), planned, folder)


def _first_step(parent: ParentRun) -> int:
    """The steps that a new run counts as done when it starts."""
    return parent.step if parent.continues else 0


def with_whole_layers(checkpoint: "Checkpoint", planned: Planned, folder: Path) -> "Checkpoint":
    """The checkpoint with its shards merged; itself, without building the model, if none must be.

    An engine reads parts of tensors as they are.

    Args:
        folder: the run folder, which receives the merged one until the first step.
    """
    from windlass.runtime import is_sharded, merge_shards, part_files

    manifest = checkpoint.manifest
    reads_parts = planned.machine.stack is not None or not part_files(manifest)
    if reads_parts and not is_sharded(manifest):
        return checkpoint
    merged = folder / CHECKPOINT_FOLDER / MERGED_CHECKPOINT_FOLDER
    stack = planned.objects.stack(planned.request.model_identity, seed=None)
    return merge_shards(checkpoint, stack, merged)


def remove_merged_checkpoint(
    steps: Callable[[], Generator[Step]], folder: Path
) -> Callable[[], Generator[Step]]:
    """The same steps; the first removes merged and converted checkpoints, which all have read."""
    checkpoints = folder / CHECKPOINT_FOLDER

    def generate() -> Generator[Step]:
        for step in steps():
            for name in (MERGED_CHECKPOINT_FOLDER, CONVERTED_CHECKPOINT_FOLDER):
                shutil.rmtree(checkpoints / name, ignore_errors=True)
            yield step

    return generate


def _no_checkpoint(record: RunRecord, step: str) -> str:
    from windlass.runtime import checkpoint_folders

    run = f"run `{record.folder.name}`"
    folders = checkpoint_folders(record.folder / CHECKPOINT_FOLDER)
    if not folders:
        return f"{run} has saved no checkpoint yet, so that no run can start from it"
    steps = " and ".join(str(int(path.name.rpartition("-")[2])) for path in folders)
    return f"{run} keeps no checkpoint of step {step}; it has those of {steps}"


def _other_weights(old: Graph, new: Graph, *, adapted: bool) -> str | None:
    """The first weight in which two models differ; None if they have the same.

    Args:
        adapted: whether the child has adapters beside the parent's weights.
    """
    before, after = list(_weights(old)), list(_weights(new))
    if adapted:
        after = [weight for weight in after if not is_adapter(weight[1])]
    if old.layers != new.layers:
        return f"it has {old.layers} layers, and `{new.name}` has {new.layers}"
    for (layer, name, shape), theirs in zip(before, after, strict=False):
        if theirs != (layer, name, shape):
            return (
                f"its layer {layer} has `{name}` as {shape}, and layer {theirs[0]} of "
                f"`{new.name}` has `{theirs[1]}` as {theirs[2]}"
            )
    if len(before) != len(after):
        return f"it has {len(before)} weights, and `{new.name}` has {len(after)}"
    return None


def _weights(graph: Graph) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Layer, name and shape of every weight."""
    layer = 0
    for run in graph.layer_runs:
        for _ in range(run.count):
            for parameter in graph.kinds[run.kind].parameters:
                yield layer, parameter.name, tuple(parameter.shape)
            layer += 1


def _breaks_in_order(parent: ParentRun, request: ResolvedRequest) -> Iterator[str]:
    """What keeps a run from going on with the parent's steps, data order and learning rates."""
    old = parent.record.request
    if request.train.steps <= parent.step:
        yield (
            f"`train.steps` = {request.train.steps}, and run `{parent.name}` has done "
            f"{parent.step} of them: name a larger number"
        )
    if old is None:
        return
    for key in ("batch", "sequence", "seed"):
        value, before = getattr(request.train, key), getattr(old.train, key)
        if value != before:
            yield f"`train.{key}` = {value}, and run `{parent.name}` has {before}"
    if request.data != old.data:
        yield f"`data` is not that of run `{parent.name}`"


def _rates(parent: ParentRun, request: ResolvedRequest) -> str:
    """The learning rates of a run that goes on with its parent's steps, as a clause."""
    from windlass.runtime import learning_rate

    new, step, old = request.train, parent.step, parent.record.request
    if old is not None and all(getattr(old.train, k) == getattr(new, k) for k in _RATE_KEYS):
        return "learning rates"
    rates = {each.step: each.learning_rate for each in parent.record.steps}
    before, after = rates.get(step), learning_rate(new, step + 1)
    if not before:
        return "learning rates"
    factor, rising = after / before, (step + 1) / step
    if 1 / _CONTINUOUS_FACTOR < factor < max(_CONTINUOUS_FACTOR, 1.01 * rising):
        return "learning rates"
    return (
        f"the schedule of one run of {new.steps} steps: the learning rate jumps by a factor of "
        f"{factor:.3g}, from {before:.3g} to {after:.3g}; "
        f"`train.learning_rate={new.learning_rate / factor:.3g}` begins where the parent ended"
    )


def _note(parent: ParentRun, request: ResolvedRequest, *, adapted: bool) -> str:
    """Where the run starts, in a sentence."""
    where = f"step {parent.step} of run `{parent.name}`"
    if parent.continues:
        return f"goes on after {where}, with its data order and {_rates(parent, request)}"
    if adapted:
        return f"trains adapters beside the weights of {where}, which stay as they are"
    note = f"starts from {where}, with steps, learning rates and data order of its own"
    old = parent.record.request
    if old is None or request.data != old.data or request.train.seed != old.train.seed:
        return note
    return (
        f"{note}: the same text in the same order; `--continue` goes on behind it instead, and "
        f"`train.seed={request.train.seed + 1}` takes another order"
    )
