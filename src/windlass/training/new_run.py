"""`train`: makes a run ready."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import RequestError
from windlass.jobs import (
    RUNS,
    Planned,
    Progress,
    make_request,
    optimizer_overrides,
    plan,
    request_origins,
)
from windlass.schema import REQUEST_FILE, Request
from windlass.training.loop.hooks import Instrumentation, LoopHooks, never_stop
from windlass.training.loop.local_ranks import rank_server
from windlass.training.loop.training_loop import make_training_loop
from windlass.training.parent import (
    ParentRun,
    find_parent,
    remove_merged_checkpoint,
    request_of_child,
)
from windlass.training.preconditions import require_engine, require_local_machine
from windlass.training.resumed_run import resume
from windlass.training.run import Run
from windlass.training.run_start import start_run

if TYPE_CHECKING:
    from torch import Tensor, nn


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
