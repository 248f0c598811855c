"""The training loop: a generator of measured steps."""

import gc
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.data.batches import Batches
from windlass.errors import CheckpointError, MemoryShort, RunBroken, RunInterrupted
from windlass.models.layer_stack import Chain
from windlass.program.device_mesh import chunks_of
from windlass.program.instruction import Program
from windlass.runtime.adamw import Optimizer, learning_rate
from windlass.runtime.checkpoint.async_saver import Saver
from windlass.runtime.checkpoint.checkpoint import (
    Checkpoint,
    Manifest,
    folder_name,
    remove_temporaries,
)
from windlass.runtime.compute import Compute, StopWished
from windlass.runtime.distributed.heartbeat import Marks
from windlass.runtime.distributed.p2p import Messages
from windlass.runtime.distributed.process_groups import Alone, Pod, World
from windlass.runtime.distributed.sharded_store import Shared
from windlass.runtime.evaluate import HeldOut, evaluate
from windlass.runtime.interpreter import Interpreter, clock_for
from windlass.runtime.layer_templates import Template, templates
from windlass.runtime.memory_stats import Peak
from windlass.runtime.offload.activations import Outputs
from windlass.runtime.offload.offloaded_store import Stream
from windlass.runtime.offload.sharded_offloaded_store import PodStream
from windlass.runtime.offload.transfer_queue import Moved, lane_of
from windlass.runtime.out_of_memory import asked_words, is_shortage, room_bytes
from windlass.runtime.param_store import Near, Residence, Saved
from windlass.runtime.verify.handler_hooks import Around, Inside
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.prediction import Timeline
from windlass.schema.request import TrainRequest
from windlass.schema.run_record import STATE_FOLDER, Step
from windlass.torch_ext.cpu_allocator import prepare_allocator


def never() -> bool:
    """No wish to stop."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Steps whose every instruction is told, with the most memory held while it ran."""

    steps: frozenset[int]
    take: Callable[[int, Timeline], None]
    """Gets the step and what was measured."""


def train(
    plan: Plan,
    chain: Chain,
    batches: Batches,
    settings: TrainRequest,
    *,
    program: Program,
    checkpoints: Path,
    resume: Checkpoint | None = None,
    device: str = "cpu",
    stop: Callable[[], bool] = never,
    watch: Watch | None = None,
    graph: Graph | None = None,
    beat: Marks | None = None,
    around: Around | None = None,
) -> Generator[Step]:
    """Trains, and yields each step once it is done.

    The first step is 1, or the one after `resume`; the last is `settings.steps`, after which a
    checkpoint is on the disk. The steps that a run yields, and its weights, are the same bit for
    bit however often it was stopped or killed and resumed.

    Args:
        plan: what `program` was lowered from.
        chain: the model; its layers may lie on the meta device. Real weights are taken over, as
            there is no room for a large model twice: they change, or leave for their home.
        batches: training and held-out sequences.
        settings: optimisation, and how often to evaluate and to save.
        program: of this device, verified.
        checkpoints: the run's folder of checkpoints, made if need be.
        resume: from `checkpoint.latest`; None begins anew.
        device: torch's name for it.
        stop: asked before each micro-batch; True saves the last whole step and ends.
        watch: steps to look at closely.
        graph: what the plan cuts; needed only where it takes several devices. Then this process is
            one of them, has joined them, and yields the same steps as all others do.
        beat: set to the step and to the index of the instruction that begins.
        around: given all handlers, gives those that run.

    Raises:
        CheckpointError: `resume` is of another model.
        MemoryShort: memory ran out; nothing of the step counts.
        RunBroken: a loss or gradient is not finite; no weight has changed by it.
        RunInterrupted: `stop` said so; the state is saved.
        StorageError: a checkpoint could not be written; the one before it is kept.
    """
    on = torch.device(device)
    run: _Run | None = None
    try:
        run = _Run(plan, chain, batches, settings, program, checkpoints, on, stop, graph, beat,
                   around)  # fmt: skip
        yield from run.steps(resume, watch)
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_shortage(error):
            raise
        asked = asked_words(error)
    else:
        return
    finally:
        if run is not None:
            run.close()
    # Outside of the handler, whose error holds on to all tensors: what follows needs memory too.
    told = f"memory ran out {run.where() if run is not None else 'before the first step'}{asked}"
    told += f"; {run.last_good()}" if run is not None else ""
    del run, resume
    gc.collect()
    raise MemoryShort(told, room_bytes=room_bytes(on))


class _Run:
    """One device's part of a run."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        batches: Batches,
        settings: TrainRequest,
        program: Program,
        checkpoints: Path,
        device: torch.device,
        stop: Callable[[], bool],
        graph: Graph | None,
        beat: Marks | None,
        around: Around | None,
    ) -> None:
        prepare_allocator()
        self._peak = Peak(device)
        self._plan, self._batches, self._settings = plan, batches, settings
        self._device, self._folder = device, checkpoints
        self._program = program
        optimizer = Optimizer(settings, device, plan.moments)
        own = f"-{program.device}" if program.device else ""
        self._state = checkpoints.with_name(STATE_FOLDER + own)
        self._at = 1
        self._beat = beat
        self._pod = Pod(plan, graph, program.device, device) if graph else None
        self._world: World = self._pod or Alone()
        self._lane = lane_of(plan, device)
        self._templates: tuple[Template, ...] = templates(
            chain, compiled=plan.compile, place=self._pod.slice if self._pod else None
        )
        self.residence = self._home(chain, graph, optimizer)
        self._outputs: Outputs | None = None
        if self._lane is not None and plan.is_offloaded("activations"):
            self._outputs = Outputs(self._lane, plan.offload.activations, self._state, device)
        self.saver = Saver(
            checkpoints, len(chain.layers), keep=settings.keep, save=self._save_layer,
            device=self._world.device, devices=self._world.devices,
        )  # fmt: skip
        self._compute = Compute(
            plan,
            program,
            self.residence,
            self._templates,
            optimizer=optimizer,
            batches=batches,
            seed=settings.seed,
            device=device,
            stop=stop,
            world=self._world,
            outputs=self._outputs,
        )
        handlers = dict(self._compute.handlers())
        self._messages: Messages | None = None
        if self._pod and graph:
            layers = self.residence.layers
            self._messages = Messages(
                plan, graph, chain, self._pod, layers, self._templates, device
            )
            handlers |= self._messages.handlers()
        if around is not None:
            handlers = dict(around(handlers, Inside(plan, graph, self._compute, self._pod)))
        self._interpreter = Interpreter(
            program, handlers, clock_for(device, len(program.instructions)), beat
        )

    def _home(self, chain: Chain, graph: Graph | None, optimizer: Optimizer) -> Residence:
        """Where the plan has weights and optimizer state live."""
        plan, seed = self._plan, self._settings.seed

        def before_update(layer: int) -> None:
            self.saver.wait_for(layer)

        if self._lane is not None and plan.is_offloaded("optimizer") and self._pod:
            return PodStream(
                plan, chain, self._state, optimizer, self._lane, self._device, self._pod,
                program=self._program, seed=seed, before_update=before_update,
            )  # fmt: skip
        if self._lane is not None and plan.is_offloaded("optimizer"):
            return Stream(
                plan, chain, self._state, optimizer, self._lane, self._device,
                program=self._program, seed=seed, before_update=before_update,
            )  # fmt: skip
        if self._pod and graph:
            return Shared(
                plan, graph, chain, optimizer, self._pod, seed=seed, device=self._device,
                before_update=before_update,
            )  # fmt: skip
        return Near(
            chain, optimizer, seed=seed, precision=plan.precision, device=self._device,
            before_update=before_update, moments=plan.moments,
        )  # fmt: skip

    def close(self) -> None:
        """Waits for the save under way, and ends all threads."""
        self.saver.close()
        if self._lane is not None:
            self._lane.close()
        if self._outputs is not None:
            self._outputs.close()
        self.residence.close()

    def steps(self, resume: Checkpoint | None, watch: Watch | None) -> Generator[Step]:
        if not self._world.device:
            remove_temporaries(self._folder)
        done = self._checked(resume) if resume else 0
        self.residence.start(resume)
        if self._plan.compile and done < self._settings.steps:
            self._compute.warm(done + 1)
        self._moved()  # what came before the first step is none of it
        for step in range(done + 1, self._settings.steps + 1):
            self.saver.check()
            try:
                self._one(step, watch)
            except StopWished:
                raise self._stopped(step - 1) from None
            except RunBroken as broken:
                raise RunBroken(f"{broken}; {self.last_good()}") from None
            ends = step == self._settings.steps
            saves = ends or step % self._settings.save_every == 0
            try:
                yield self._measured(step, saves=saves)
            finally:
                # After the step is handed over: else a kill between the two would leave a
                # checkpoint of a step that nobody has a record of. Also if nobody asks for more.
                if saves:
                    self._save(step)
            if ends:
                self.saver.finish()
            elif self._compute.stops:
                raise self._stopped(step)

    def _checked(self, checkpoint: Checkpoint) -> int:
        """The step of a checkpoint that is of this run."""
        manifest = checkpoint.manifest
        if manifest.graph != self._plan.graph:
            raise CheckpointError(
                f"`{checkpoint.path}` is of `{manifest.graph}` and the plan of `{self._plan.graph}`"
            )
        if manifest.samples != manifest.step * self._batches.batch:
            raise CheckpointError(
                f"`{checkpoint.path}` has taken {manifest.samples} samples in {manifest.step} "
                f"steps, not {self._batches.batch} a step; resume with the batch it was made with"
            )
        self.saver.found(manifest.step)
        return manifest.step

    def _one(self, step: int, watch: Watch | None) -> None:
        """Runs one step and tells the watcher, if it is one that is looked at."""
        self._at = step
        if self._beat is not None:
            self._beat[0] = step
        self._compute.begin(step)
        if self._messages:
            self._messages.flow = self._compute.flow
        if watch is None or step not in watch.steps:
            self._interpreter.run()
        else:
            memory = self._interpreter.sample(self._peak.look)
            watch.take(step, self._interpreter.timeline(memory))
        if self._pod:
            self._pod.settle_messages()

    def _measured(self, step: int, *, saves: bool) -> Step:
        """What the step that just ran leaves behind; evaluates where due."""
        settings, compute = self._settings, self._compute
        due = step == settings.steps or step % settings.evaluate_every == 0
        evaluates = due and settings.evaluate_sequences > 0
        settling = time.perf_counter()
        if evaluates or saves:
            self.residence.settle(self._program)
        settled = time.perf_counter() - settling
        moved = self._moved()
        held_out = self._evaluate() if evaluates else None
        if evaluates:
            self._moved()
        peak = self._peak.highest()
        return Step(
            step=step,
            loss=compute.loss,
            gradient_norm=compute.gradient_norm,
            learning_rate=learning_rate(settings, step),
            tokens=self._plan.tokens_per_step,
            seconds=self._interpreter.seconds(),
            memory_bytes=round(self._world.most(peak)),
            device_memory_bytes=peak if self._pod else None,
            read_bytes=moved.read_bytes,
            written_bytes=moved.written_bytes,
            settle_seconds=settled if self._plan.offloads and (evaluates or saves) else 0.0,
            by_kind=self._interpreter.by_kind(),
            held_out_loss=held_out.loss if held_out else None,
            held_out_bits_per_byte=held_out.bits_per_byte if held_out else None,
            saved=folder_name(step) if saves else None,
        )

    def _moved(self) -> Moved:
        """What went between tiers since this was asked last."""
        return Moved() if self._lane is None else self._lane.moved()

    def _evaluate(self) -> HeldOut:
        return evaluate(
            self.residence,
            self._templates,
            self._batches,
            phases=[
                phase
                for chunk in chunks_of(self._plan, self._world.place.stage)
                for phase in self._plan.stages[chunk].phases
            ],
            sequences=self._settings.evaluate_sequences,
            micro=self._plan.batch.micro,
            bare=self._compute.bare,
            device=self._device,
            world=self._world,
            messages=self._messages,
            replicas=self._plan.parallel.data,
            done=self._live,
        )

    def _save(self, step: int) -> None:
        self.saver.begin(
            Manifest(
                step=step,
                samples=step * self._batches.batch,
                seed=self._settings.seed,
                plan=self._plan.label,
                graph=self._plan.graph,
                files={},
            )
        )

    def _stopped(self, done: int) -> RunInterrupted:
        """Saves the last whole step, if it is not saved already."""
        if done and self.saver.newest != done:
            self.residence.settle(self._program)
            self._save(done)
        self.saver.finish()
        return RunInterrupted(f"stopped after step {done}; {self.last_good()}")

    def _save_layer(self, index: int, path: Path) -> Saved | None:
        """Saves one layer, from the saver's thread."""
        saved = self.residence.save(index, path)
        self._live()
        return saved

    def _live(self) -> None:
        """Gives a sign of life that is no instruction."""
        if self._beat is not None:
            self._beat[2] += 1

    def where(self) -> str:
        """The step that ran last."""
        return f"in step {self._at}"

    def last_good(self) -> str:
        """Where to go on from, in words."""
        newest = self.saver.settled()
        if newest is None:
            return "no checkpoint was written yet"
        return f"the last good checkpoint is `{self._folder / folder_name(newest)}`"
