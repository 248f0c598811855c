"""`train`: makes a run ready."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from windlass.errors import InputErrors, PlanError, RequestError
from windlass.jobs import (
    RUNS,
    Planned,
    Progress,
    make_request,
    optimizer_overrides,
    plan,
    plan_request,
    prepare_data,
    request_origins,
    size_of,
)
from windlass.models import find_model_folder, is_huggingface
from windlass.program import Program, unmet_needs
from windlass.schema import REQUEST_FILE, Request
from windlass.stacks import load_stack
from windlass.stop_signals import end_until_asked
from windlass.tracking import (
    RunFolder,
    create_run_folder,
    is_unfinished_start,
    require_no_other_content,
)
from windlass.training.disk_check import require_disk_space
from windlass.training.inputs.batches import (
    data_metadata,
    data_notes,
    make_batches,
    with_document_lengths,
)
from windlass.training.inputs.data_fit import require_vocabulary
from windlass.training.inputs.job import require_named_data
from windlass.training.inputs.run_data import (
    load_run_tokens,
    requested_text_fingerprint,
    save_model_config,
    save_run_data,
)
from windlass.training.inputs.run_tasks import requested_tasks
from windlass.training.legs import plan_later_legs
from windlass.training.loop.hooks import Instrumentation, LoopHooks, never_stop
from windlass.training.loop.local_ranks import rank_server
from windlass.training.loop.training_loop import make_training_loop
from windlass.training.parent import (
    ParentRun,
    find_parent,
    link_to_parent,
    plan_of_child,
    remove_merged_checkpoint,
    request_of_child,
    require_tokens_of_parent,
    start_from_parent,
)
from windlass.training.preconditions import (
    note_sparse_kernels,
    require_engine,
    require_local_machine,
    require_one_process,
    require_pretrained_model,
    verified_programs,
)
from windlass.training.resumed_run import resume
from windlass.training.run import Run
from windlass.training.run_files import input_documents, run_documents, run_metadata

if TYPE_CHECKING:
    from torch import Tensor, nn

    from windlass.data import ExampleDataset, TokenDataset, TrainingBatches
    from windlass.runtime import Checkpoint


def train(
    what: "Planned | Request | str | nn.Module | Callable[..., nn.Module] | None" = None,
    *overrides: str,
    loss: "Callable[[Tensor, Tensor], Tensor] | None" = None,
    data: object = None,
    optimizer: object = None,
    root: Path | str = RUNS,
    folder: Path | None = None,
    parent: ParentRun | str | Path | None = None,
    group: str | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
    instrumentation: Instrumentation | None = None,
) -> Run:
    """Makes a run ready: tokens, verified programs, run folder. Iterating over it trains.

    Args:
        what: a model's name, a request, or the result of `plan`; an `nn.Sequential` of layers,
            which has the trained weights after the last step, or a function that returns one;
            None means the request of `parent`, or that for `gpt-tiny`.
        overrides: `key=value`, if `what` is a model or None.
        loss: of logits `[b s v]` and targets `[b s]`, as `plan` takes it.
        data: a source, texts, token ids, or pairs of inputs and targets, as `plan` takes them.
        optimizer: a name, or a class or object of torch's, as `plan` takes them.
        root: the folder that holds the run folders.
        folder: train into this folder instead of a new one under `root`.
        parent: a run whose newest checkpoint the new run starts from, with steps of its own; the
            result of `find_parent` says more.
        group: a name that several runs share, such as that of a sweep.
        stop: polled before each micro-batch; True saves and ends.
        progress: called with how far preparations are.
        instrumentation: what a verification records and injects.

    Raises:
        WindlassError: what is wrong with the request, the data, the machine or the folder.
    """
    end_until_asked(stop)
    if parent is not None and not isinstance(parent, ParentRun):
        parent = find_parent(parent, root=root)
    if optimizer is not None:
        overrides = (*optimizer_overrides(optimizer), *overrides)
    fine_tunes = False
    if what is None and parent is not None:
        request = make_request(None, *overrides, file=parent.record.folder / REQUEST_FILE)
        given = request_origins(None, *overrides)
        what, fine_tunes = request_of_child(request, parent, given)
        overrides = ()
    if not isinstance(what, Planned):
        planned = plan(
            what, *overrides, loss=loss, data=data, fine_tunes=fine_tunes, progress=progress
        )
    elif overrides or loss is not None or data is not None:
        raise RequestError(
            "a finished plan takes no overrides, loss, data or optimizer; give them to `plan`"
        )
    else:
        planned = what
    require_engine(planned)
    require_local_machine(planned)
    server = rank_server(planned, planned.plan.parallel.devices)
    run = start_run(
        planned, root=root, folder=folder, parent=parent, group=group, progress=progress
    )
    hooks = LoopHooks(stop=stop or never_stop, instrumentation=instrumentation)
    steps = make_training_loop(
        run.planned, run.batches, run.programs, run.folder, run.checkpoint, hooks, server
    )
    done = run.checkpoint.manifest.step if run.checkpoint else 0
    steps = remove_merged_checkpoint(steps, run.folder.path)
    started = Run(run.planned, run.folder, steps, done=done, notes=run.planned.notes)
    objects = run.planned.objects
    started.next_leg = partial(
        resume, started.folder, model=objects.model, loss=objects.loss, stop=stop
    )
    return started


class StartedRun(NamedTuple):
    """A run before its first step."""

    planned: Planned
    """What is run."""
    folder: RunFolder
    programs: tuple[Program, ...]
    """One for each rank."""
    tokens: "TokenDataset | ExampleDataset"
    batches: "TrainingBatches"
    checkpoint: "Checkpoint | None"
    """Where it starts; None starts from the beginning."""


def start_run(
    planned: Planned,
    *,
    root: Path | str,
    folder: Path | None,
    parent: ParentRun | None = None,
    group: str | None = None,
    progress: Progress | None,
    fill: "Callable[[RunFolder, TokenDataset | ExampleDataset], object]" = lambda *_: None,
) -> StartedRun:
    """Creates and locks the folder of a new run, and writes its documents and tokenizer there.

    Args:
        folder: use this folder instead of a new one under `root`, and the tokens in it if there
            are any.
        parent: the run to start from; None starts from the beginning.
        group: a name that several runs share, such as that of a sweep.
        fill: writes what else is in the folder before it counts as a run.

    Raises:
        WindlassError: what is wrong with the plan, the data, the disk or the folder.
    """
    if folder is not None:
        require_no_other_content(folder)
    if parent is not None:
        planned = plan_of_child(planned, parent)
    planned = plan_later_legs(planned, parent, progress)
    require_engine(planned)
    require_one_process(planned)
    planned = note_sparse_kernels(planned, progress)
    if parent is None:
        require_pretrained_model(planned)
    require_disk_space(planned, folder or Path(root))
    require_named_data(planned)
    tokens, meta = _dataset(planned, folder, progress)
    planned = replace(planned, data=size_of(tokens, planned.request))
    if parent:
        meta["parent"] = parent.metadata
    if group is not None:
        meta["group"] = group
    if progress is not None:
        progress("loading torch", 0, None)  # which takes seconds, and what follows computes
    require_vocabulary(planned, tokens)
    if parent is not None:
        require_tokens_of_parent(parent, tokens)
    batches, programs = make_batches(planned, tokens), verified_programs(planned)
    if progress is not None:
        progress("loading torch", 1, 1)
    planned = with_document_lengths(planned, batches)
    planned = replace(planned, notes=(*planned.notes, *data_notes(batches)))
    tasks = requested_tasks(planned.request, tokens, planned.graph.max_sequence)

    def fill_folder(run: RunFolder) -> None:
        run.seal(
            *save_run_data(tokens, run.path),
            *tasks.save(run.path),
            *save_model_config(planned.request.model.name, run.path),
        )
        link_to_parent(parent, planned, run.path)
        fill(run, tokens)

    run_folder = create_run_folder(
        Path(root),
        _short_name(planned.request.model.name),
        documents=run_documents(planned, programs) | input_documents(planned, tokens),
        meta=run_metadata(planned, tokens) | data_metadata(batches) | meta,
        folder=folder,
        fill=fill_folder,
    )
    checkpoint = start_from_parent(parent, planned, run_folder.path)
    return StartedRun(planned, run_folder, programs, tokens, batches, checkpoint)


def _dataset(
    planned: Planned, folder: Path | None, progress: Progress | None
) -> tuple["TokenDataset | ExampleDataset", dict[str, object]]:
    """What a run trains on, and what its record says of a text that was read for it."""
    if planned.objects.examples is not None:
        return planned.objects.examples, {}
    kept = None if folder is None or is_unfinished_start(folder) else load_run_tokens(folder)
    if kept is not None:
        return kept, {}
    tokens = prepare_data(planned.request, progress)
    return tokens, {"text": requested_text_fingerprint(planned.request)}


def _short_name(model: str) -> str:
    """The part of a model's name that a run's folder bears: of a long path, its end."""
    return find_model_folder(model).config.resolve().parent.name if is_huggingface(model) else model


_STACK = "torch"


def on_default_stack(planned: Planned, *, progress: Progress | None = None) -> Planned:
    """The plan to run, for `torch` if it is for several GPUs; its first note says why.

    Args:
        planned: what a search has found, for the stack that its request names, if any.
        progress: called with how far the search is.

    Raises:
        PlanError: nothing fits.
    """
    several = planned.plan.parallel.devices > 1 and planned.machine.device.kind == "cuda"
    if planned.request.stack is not None or not several:
        return planned
    own = f"runs on Windlass's own runtime: `{_STACK}`, the default for several GPUs,"
    if needs := unmet_needs(planned.request, load_stack(_STACK)):
        return _with_note(planned, f"{own} has no {needs[0].lacks} (`{needs[0].key}`)")
    request = planned.request.model_copy(update={"stack": _STACK})
    try:
        other = plan_request(request, planned.objects, progress)
        prediction = other.prediction
    except (InputErrors, PlanError) as error:
        return _with_note(planned, f"{own} has no plan for it: {str(error).splitlines()[0]}")
    note = (
        f"runs on PyTorch's own distributed parts, stack `{_STACK}`, the default for several GPUs; "
        f"`--stack windlass` is Windlass's own runtime ({_ratio(planned, prediction.step_seconds)})"
    )
    return _with_note(other, note)


def _ratio(own: Planned, seconds: float) -> str:
    """How long a step of the own runtime takes beside one of so many seconds."""
    return f"predicted at {own.prediction.step_seconds / seconds:.2f} of its time a step"


def _with_note(planned: Planned, note: str) -> Planned:
    return replace(planned, notes=(note, *planned.notes))
