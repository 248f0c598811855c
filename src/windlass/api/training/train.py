"""Running: makes a run ready, trains, journals every step."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path

from windlass.api.machines import Progress
from windlass.api.plan import Planned, plan
from windlass.api.runs import RUNS
from windlass.api.training.instrumentation import Instrumentation
from windlass.api.training.oom_advice import with_ways
from windlass.api.training.setup import make_training_loop, never_stop, require_local_machine
from windlass.api.training.start_run import start_run
from windlass.errors import OutOfMemory, RecordError, RequestError, RunInterrupted
from windlass.schema.request import Request
from windlass.schema.run_record import RunState, Step
from windlass.tracking.run_folder import RunFolder


class Run:
    """A run that is ready to go; iterate over it once to get its measured steps.

    Made by `train` and `resume`. Its folder is held from the start and freed at the end.
    """

    def __init__(
        self,
        planned: Planned,
        held: RunFolder,
        steps: Callable[[], Generator[Step]],
        *,
        done: int = 0,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.planned = planned
        self.folder = held.path
        self.done = done
        """Steps that earlier attempts left behind."""
        self.notes = notes
        """What a user should know before it goes on."""
        self._held = held
        self._steps = steps
        self._begun = False

    def __iter__(self) -> Iterator[Step]:
        """Trains; journals and yields every step.

        Raises:
            MemoryShort: memory ran out; the message names plans that fit into what there was.
            RecordError: it was iterated over before.
            RunBroken: a loss or gradient is not finite.
            RunInterrupted: the caller's `stop` said so; the state is saved.
            StorageError: the disk is full; the last good checkpoint is kept.
        """
        if self._begun:
            raise RecordError(
                f"run `{self.folder.name}` was iterated over before; go on with `resume`"
            )
        self._begun = True
        state: RunState = "broken"
        reason = "the program failed"
        short: OutOfMemory | None = None
        try:
            with closing(self._steps()) as steps:
                for step in steps:
                    self._held.append_step(step)
                    yield step
            state, reason = "finished", ""
        except (RunInterrupted, KeyboardInterrupt, GeneratorExit) as error:
            state, reason = "interrupted", str(error)
            raise
        except OutOfMemory as error:
            # The tensors that its frames hold would leave no room for what follows.
            short, reason = error.with_traceback(None), str(error)
        except Exception as error:
            reason = str(error)
            raise
        finally:
            self._held.end(state, reason=reason)
        if short is not None:
            raise with_ways(short, self.planned, self.folder)


def train(
    what: Planned | Request | str,
    *overrides: str,
    root: Path | str = RUNS,
    folder: Path | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
    instrumentation: Instrumentation | None = None,
) -> Run:
    """Makes a run ready: tokens, verified program, run folder. Iterating over it trains.

    Args:
        what: a model's name, a request, or what `plan` gave.
        overrides: `key=value`, if `what` is a name.
        root: where run folders lie.
        folder: trains into this folder in place of a new one under `root`.
        stop: asked before each micro-batch; True saves and ends.
        progress: told how far preparations are.
        scrutiny: of a proof.

    Raises:
        WindlassError: what is wrong with the request, the data, the machine or the folder.
    """
    if not isinstance(what, Planned):
        planned = plan(what, *overrides, progress=progress)
    elif overrides:
        raise RequestError("what is planned takes no overrides; give them to `plan`")
    else:
        planned = what
    require_local_machine(planned)
    held, programs, _, found = start_run(planned, root=root, folder=folder, progress=progress)
    steps = make_training_loop(
        planned, found, programs, held, None, stop or never_stop, instrumentation
    )
    return Run(planned, held, steps)
