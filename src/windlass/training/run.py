"""`Run`: iterating over it trains, and puts every step on record."""

import shlex
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

from windlass import planner
from windlass.errors import (
    OutOfMemory,
    RecordError,
    RunBroken,
    RunInterrupted,
    StorageError,
)
from windlass.jobs import Planned, load, note_compiled_code, take_trained_weights
from windlass.report import run_notebook
from windlass.schema import CHECKPOINT_FOLDER, RunState, Step
from windlass.sparsity import leg_before_others
from windlass.torch_ext import set_memory_limit, trim_heap
from windlass.tracking import RunFolder, SystemMonitor
from windlass.units import format_bytes


class Run:
    """A run that is ready to go; iterate over it once to train and get its measured steps.

    Made by `train` and `resume`. Its folder is locked from the start, and released at the end.
    """

    def __init__(
        self,
        planned: Planned,
        folder: RunFolder,
        steps: Callable[[], Generator[Step]],
        *,
        done: int = 0,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.planned = planned
        """What is run."""
        self.folder = folder.path
        """The run folder."""
        self.short_id = folder.short_id
        """The last digits of the run's id, by which commands find it among other runs."""
        self.done = done
        """Number of steps that earlier attempts have completed."""
        self.notes = notes
        """What a user should know before the run starts, a sentence each."""
        self.next_leg: Callable[[], Run] | None = None
        """Goes on with the next leg of a run whose weights change their shapes; None cannot."""
        self._run_folder = folder
        self._steps = steps
        self._started = False

    def __repr__(self) -> str:
        steps = self.planned.request.train.steps
        return f"<Run {self.folder} of {self.planned.graph.name}: {self.done} to {steps} steps>"

    def _repr_html_(self) -> str:
        return run_notebook(load(self.folder))

    def __iter__(self) -> Iterator[Step]:
        """Trains; puts every step on record and yields it.

        Raises:
            OutOfMemory: memory ran out; the message proposes plans that fit into what there was.
            RecordError: the run was iterated over before, or its folder was deleted or moved.
            RunBroken: a loss or gradient is not finite.
            RunInterrupted: the caller's `stop` returned True; the state is saved.
            StorageError: the disk is full; the last good checkpoint is kept.
        """
        if self._started:
            raise RecordError(
                f"run `{self.folder.name}` was iterated over before; continue it with `resume`"
            )
        self._started = True
        while not (yield from self._leg()) and self.next_leg is not None:
            following = self.next_leg()
            self.planned, self.notes = following.planned, following.notes
            self._run_folder, self._steps = following._run_folder, following._steps  # noqa: SLF001

    def _leg(self) -> Generator[Step, None, bool]:
        """Trains one leg of the run; returns whether it was the last one."""
        state: RunState = "broken"
        reason = "the program failed"
        out_of_memory: OutOfMemory | None = None
        request = self.planned.request
        try:
            with closing(self._steps()) as steps, SystemMonitor(self._run_folder.journal):
                for index, step in enumerate(steps):
                    self._run_folder.append_step(step)
                    if not index and self.planned.machine.system is not None:
                        note_compiled_code(self.planned.plan, self.planned.graph)
                    yield step
            if leg := leg_before_others(request.sparsity, request.train.steps):
                state, reason = "interrupted", f"{leg} is complete"
                return False
            self._take_trained_weights()
            state, reason = "finished", ""
        except (RunInterrupted, KeyboardInterrupt, GeneratorExit) as error:
            state, reason = "interrupted", str(error)
            raise
        except OutOfMemory as error:
            # Its traceback refers to the frames that hold all tensors, and planning needs memory.
            out_of_memory, reason = error.with_traceback(None), str(error)
        except SystemExit as error:
            reason = f"code of the model `{self.planned.request.model.name}` called exit"
            raise RunBroken(reason) from error
        except Exception as error:
            reason = str(error)
            # Without the folder anything may fail, and its own message would mislead.
            self._run_folder.require_present()
            raise
        finally:
            # On a full disk its own error would hide the one that ends the run.
            with suppress(*([StorageError, RecordError] if reason else [])):
                self._run_folder.end(state, reason=reason)
        if out_of_memory is not None:
            raise with_advice(out_of_memory, self.planned, self.folder)
        return True

    @property
    def record_fault(self) -> str | None:
        """Why the disk does not take records now, which wait in memory; None if it has them all."""
        return self._run_folder.journal.fault

    def record_verdict(self, verdict: Mapping[str, object]) -> None:
        """Puts a verdict on the run on its record, while the run goes on.

        Args:
            verdict: the fields of a `Verdict`.

        Raises:
            RecordError: the folder was deleted or moved.
        """
        self._run_folder.append_event("verdict", **verdict)

    def _take_trained_weights(self) -> None:
        """Gives a module that the run was given its trained weights."""
        if self.planned.objects.model is None:
            return
        from windlass.runtime import latest_checkpoint

        if checkpoint := latest_checkpoint(self.folder / CHECKPOINT_FOLDER):
            identity = self.planned.request.model_identity
            take_trained_weights(self.planned.objects, checkpoint, identity)


_ALTERNATIVES = 3
"""Number of plans that the message proposes."""
_MIB = 2**20


def with_advice(error: OutOfMemory, planned: Planned, folder: Path) -> OutOfMemory:
    """The same error, with the fastest plans of each kind that fit into the memory there was."""
    set_memory_limit(0)
    trim_heap()
    budget = error.available_bytes // _MIB
    prediction = planned.prediction
    peak = prediction.peaks[0].peak_bytes
    changes = planner.alternatives(
        planned.request,
        planned.graph,
        planned.machine,
        budget * _MIB,
        base=prediction.step_seconds / prediction.tokens_per_step,
        count=_ALTERNATIVES,
    )
    available = f"{format_bytes(error.available_bytes)} were available to this process"
    resume = f"windlass resume {shlex.quote(str(folder))}"
    lines = [
        f"{error}; {available}, and {format_bytes(peak)} were predicted",
        f"`{resume}` continues this run where there is more memory",
    ]
    lines += ["a new run fits into that memory with"] if changes else []
    lines += [f"- {planner.explain_change(change, f'memory={budget}MiB')}" for change in changes]
    return OutOfMemory("\n".join(lines), available_bytes=error.available_bytes)
