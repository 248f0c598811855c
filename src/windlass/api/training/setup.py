"""Prepares what a training loop needs: tokens, batches, verified programs, and the loop itself."""

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.machines import HERE, Progress
from windlass.api.plan import Planned
from windlass.api.run_tasks import load_run_tasks
from windlass.api.training.inputs.batches import make_batches
from windlass.api.training.instrumentation import LoopHooks
from windlass.api.training.legs import refuse_offloaded_masks
from windlass.api.training.local_launch import train_local_ranks
from windlass.atomic_files import cache_folder, storage_errors
from windlass.errors import DataError, MachineError, PlanError
from windlass.models import (
    find_model_folder,
    is_causal,
    is_huggingface,
    is_pretrained,
    is_users_own,
)
from windlass.program import (
    Program,
    lower,
    require_valid_plan,
    runtime_gaps,
    verify_programs,
)
from windlass.schema import (
    CHAT_TEMPLATE_FILE,
    CHECKPOINT_FOLDER,
    EXAMPLES_FILE,
    HOST_TIER,
    MEASURED_TIMELINE_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
    TOKENS_FOLDER,
    Request,
    Step,
    Timeline,
)
from windlass.torch_ext import install_allocator, trim_heap
from windlass.tracking import RunFolder

if TYPE_CHECKING:
    from windlass.data import (
        ExampleDataset,
        TokenDataset,
        TrainingBatches,
    )
    from windlass.models import LayerStack
    from windlass.runtime import Checkpoint, MemoryLimit
    from windlass.torch_ext import Device

_RECORDED_STEP = 3
"""Step whose timeline is measured, counted within an attempt: caches are warm by then."""


def prepare_data(request: Request, progress: Progress | None) -> "TokenDataset | ExampleDataset":
    """The tokens of a request's text, or its images: from the cache, or prepared now.

    Raises:
        DataError: the data are missing, empty or too few.
    """
    if request.data.format == "images":
        from windlass.data import prepare_images

        return prepare_images(request.data, cache=cache_folder() / "images", progress=progress)
    return prepare_tokens(request, progress)


def prepare_tokens(request: Request, progress: Progress | None) -> "TokenDataset":
    """The tokens of a request's text: from the cache, or tokenized now.

    Raises:
        DataError: the text is missing, empty or too short, or the request names images.
    """
    from windlass.data import prepare_dataset

    if request.data.format == "images":
        raise DataError("`data.format` = images, and images have no tokens; name text here")
    tokens = prepare_dataset(request.data, cache=cache_folder() / "tokens", progress=progress)
    trim_heap()
    return tokens


def requested_text_fingerprint(request: Request) -> str:
    """The fingerprint of the text or images that a request names, however they are prepared.

    Raises:
        DataError: they are missing or cannot be read.
    """
    from windlass.data import image_fingerprint, text_fingerprint

    if request.data.format == "images":
        return image_fingerprint(request.data, cache=cache_folder() / "images")
    return text_fingerprint(request.data, cache=cache_folder() / "tokens")


def load_run_tokens(folder: Path) -> "TokenDataset | ExampleDataset | None":
    """The tokens or examples that lie in a run folder itself; None if there are none."""
    from windlass.data import load_examples, open_dataset

    return load_examples(folder / EXAMPLES_FILE) or open_dataset(folder / TOKENS_FOLDER)


def save_run_data(tokens: "TokenDataset | ExampleDataset", folder: Path) -> tuple[str, ...]:
    """Writes what a run folder keeps of its data, and returns the names of the files.

    Examples are kept as they are, but for images that their source holds; of a text, which its
    source holds, only the tokenizer, and of conversations their template.

    Raises:
        StorageError: the disk is full.
    """
    from windlass.data import ExampleDataset

    if isinstance(tokens, ExampleDataset):
        if tokens.content is not None:
            return ()
        with storage_errors(folder / EXAMPLES_FILE):
            tokens.save(folder / EXAMPLES_FILE)
        return (EXAMPLES_FILE,)
    tokens.tokenizer.save(folder / TOKENIZER_FILE)
    if tokens.conversations is None:
        return (TOKENIZER_FILE,)
    tokens.conversations.template.save(folder)
    return (TOKENIZER_FILE, CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE)


def require_one_process(planned: Planned) -> None:
    """Refuses a plan for several processes whose model no other process can build.

    Raises:
        PlanError: the model or its loss was passed as an object, and the plan has several devices.
    """
    devices = planned.plan.parallel.devices
    if devices > 1 and not planned.objects.is_rebuildable:
        raise PlanError(
            f"the plan has {devices} devices, a process each, and the model or its loss is an "
            "object of this process alone; put the function that builds it into a file that is "
            "imported, or set `parallel` to 1 everywhere"
        )


def require_own_runtime(planned: Planned) -> None:
    """Refuses a plan for another software stack, or for what the runtime cannot run yet.

    Raises:
        PlanError: the plan is for another stack.
    """
    stack = planned.machine.stack
    if stack is not None:
        gaps = runtime_gaps(planned.plan)
        lacks = f", and has no {' and no '.join(gaps)} yet" if gaps else ""
        raise PlanError(
            f"the plan is for the stack `{stack.name}`, which `plan` and `fit` predict; Windlass's "
            f"own runtime is another one{lacks}; plan without `--stack` to run it here"
        )


def note_sparse_kernels(planned: Planned, progress: Progress | None) -> Planned:
    """The plan with a note of what multiplies kept blocks, which is built now if it can be.

    Args:
        planned: what will be run; one without kept blocks is returned as it is.
        progress: called if the build takes long.
    """
    sparsity, kind = planned.request.sparsity, planned.machine.device.kind
    if sparsity is None or not sparsity.is_blocked or kind not in ("cpu", "cuda"):
        return planned
    import torch

    from windlass.sparsity import implementation

    dtypes = {"bfloat16": torch.bfloat16, "float64": torch.float64}
    dtype = dtypes.get(planned.plan.precision, torch.float32)
    words = implementation(torch.device(kind), dtype, progress=progress)
    note = f"kept blocks are multiplied by {words}"
    return replace(planned, notes=(*planned.notes, note))


def require_pretrained_model(planned: Planned) -> None:
    """Refuses a Hugging Face folder whose weights cannot be trained; others pass.

    Raises:
        ModelError: the folder has no weights that can be read.
        InputErrors: every tensor that does not fit its `config.json`.
        DataError: the folder has no tokenizer, and the request names none.
    """
    name, request = planned.request.model.name, planned.request
    folder = find_model_folder(name).weights if is_huggingface(name) else None
    if folder is None:
        return
    planned.objects.stack(request.model_identity, seed=request.train.seed)
    takes_tokens = planned.objects.examples is None and planned.graph.examples is None
    if takes_tokens and "tokenizer" not in request.data.model_fields_set:
        raise DataError(
            f"`{folder}` has no `tokenizer.json`, and the weights know the tokens of their own "
            "tokenizer alone; write it by `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
            ", or name one as `data.tokenizer`"
        )


def require_vocabulary(planned: Planned, tokens: "TokenDataset | ExampleDataset") -> None:
    """Refuses a model whose vocabulary is smaller than the tokenizer's.

    A model that predicts masked tokens needs one more entry, for the mask token.

    Raises:
        PlanError: the model's vocabulary is too small.
    """
    from windlass.data import ExampleDataset

    if isinstance(tokens, ExampleDataset):
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
    name = planned.request.model.name
    mask_entries = 0 if is_causal(name) or tokens.tokenizer.mask_token is not None else 1
    if tokens.vocabulary + mask_entries > planned.graph.vocabulary:
        mask = " and one for the mask token" if mask_entries else ""
        way_out = "raise `model.vocabulary` or lower `data.vocabulary`"
        if is_huggingface(name):
            way_out = "name the tokenizer that belongs to the model as `data.tokenizer`"
        raise PlanError(
            f"the tokenizer has {tokens.vocabulary} entries{mask} and the model only "
            f"{planned.graph.vocabulary}; {way_out}"
        )


def _require_shape(planned: Planned, data: "ExampleDataset") -> None:
    """Refuses examples that the model does not take.

    Raises:
        PlanError: they have another shape, or targets of another kind.
    """
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


def require_local_machine(planned: Planned) -> None:
    """Refuses a plan for another machine.

    Raises:
        MachineError: the requested machine is not this one.
    """
    if planned.request.machine != HERE:
        raise MachineError(
            f"machine `{planned.request.machine}` is not this one: `plan` and `fit` predict what "
            f"it would do, `train` runs on this one (`--on {HERE}`, also with the plan file of "
            "another machine), and `launch` prepares a run for a cluster"
        )


def verified_programs(planned: Planned) -> tuple[Program, ...]:
    """The programs of all ranks, verified.

    Every run passes here, because a plan may come from a search or from an edited file.

    Raises:
        InputErrors: every rule that the plan breaks.
        PlanError: a program cannot be verified, or the model keeps running statistics and is
            replicated or sharded.
    """
    plan, graph, machine = planned.plan, planned.graph, planned.machine
    require_valid_plan(plan, graph, machine, global_batch=planned.request.train.batch)
    refuse_offloaded_masks(planned)
    may_keep_statistics = graph.examples is not None or is_users_own(planned.request.model.name)
    if may_keep_statistics and plan.parallel.devices > plan.parallel.pipeline:
        _refuse_running_statistics(planned)
    programs, device = lower(plan, graph), machine.device
    capacities = {t.name: t.capacity_bytes for t in device.tiers if t.name == HOST_TIER}
    capacities[device.memory.name] = _tensor_budget_bytes(planned)
    verify_programs(programs, plan, graph, capacities)
    return programs


def _refuse_running_statistics(planned: Planned) -> None:
    """Refuses batch norms whose statistics several devices would each keep of their own part.

    Raises:
        PlanError: a layer has running statistics.
    """
    from windlass.models import norm_statistics

    stack = planned.objects.stack(planned.request.model_identity, seed=None)
    for name, layer in zip(stack.names, stack.layers, strict=True):
        if statistics := sorted(norm_statistics(layer)):
            raise PlanError(
                f"layer `{name}` of `{stack.name}` keeps running statistics (`{statistics[-1]}`), "
                "which data- and tensor-parallel ranks would each keep of their own samples; set "
                "`parallel.data=1` and `parallel.tensor=1`, or use a norm without them, such as "
                "`nn.LayerNorm`"
            )


def _tensor_budget_bytes(planned: Planned) -> int:
    """Device memory for tensors: the budget less what the process takes before any tensor."""
    device = planned.machine.device
    budget_bytes = planned.request.memory or device.memory.capacity_bytes
    return budget_bytes - device.process_bytes(compiled=planned.plan.compile)


def prepare_batches(planned: Planned) -> "TrainingBatches":
    """The batches of a run, whose data come from the cache or are prepared now.

    Raises:
        DataError: the text is missing, empty or too short.
    """
    return make_batches(planned, prepare_data(planned.request, None))


def make_training_loop(
    planned: Planned,
    batches: "TrainingBatches",
    programs: tuple[Program, ...],
    folder: RunFolder,
    checkpoint: "Checkpoint | None",
    hooks: LoopHooks,
) -> Callable[[], Generator[Step]]:
    """The training loop of a run, which begins when it is called.

    Args:
        planned: what is run.
        batches: training and held-out sequences.
        programs: one runs in this process; several run as local ranks, a process each.
        folder: the run folder, open for this attempt.
        checkpoint: the checkpoint to start from; None starts from the beginning.
        hooks: what the caller attaches.
    """
    if len(programs) == 1:
        from windlass.torch_ext import device_for

        _prepare_memory(planned)
        device, stack = device_for(planned.machine.device.kind), _new_stack(planned, checkpoint)
        return lambda: _training_loop(
            planned, stack, batches, programs[0], folder.path, checkpoint, device, hooks
        )
    return lambda: train_local_ranks(
        planned,
        programs,
        folder.path,
        attempt=folder.attempt,
        checkpoint=checkpoint.path if checkpoint else None,
        hooks=hooks,
    )


def train_rank(
    planned: Planned,
    rank: int,
    folder: Path,
    checkpoint: Path | None,
    device: "Device",
    hooks: LoopHooks,
) -> Generator[Step]:
    """The training loop of one rank of several.

    Args:
        planned: what the run was made from.
        rank: the rank that this process runs.
        folder: the run folder.
        checkpoint: the checkpoint that all ranks start from; None starts from the beginning.
        device: the device that this rank computes on.
        hooks: what the caller attaches; `stop` asks all ranks to end after the current step.
    """
    from windlass.runtime import open_checkpoint

    _prepare_memory(planned)
    tokens = load_run_tokens(folder) or prepare_data(planned.request, None)
    batches, program = make_batches(planned, tokens), lower(planned.plan, planned.graph)[rank]
    start = open_checkpoint(checkpoint) if checkpoint else None
    new = _new_stack(planned, start)
    return _training_loop(planned, new, batches, program, folder, start, device, hooks)


def _new_stack(planned: Planned, checkpoint: "Checkpoint | None") -> "LayerStack":
    model, seed = planned.request.model_identity, planned.request.train.seed
    return planned.objects.stack(model.saved if checkpoint else model, seed=seed)


def _prepare_memory(planned: Planned) -> None:
    """Limits the memory of this process to what its rank needs; precedes torch's first tensor."""
    install_allocator()
    _memory_limit(planned).apply()


def _memory_limit(planned: Planned) -> "MemoryLimit":
    from windlass.runtime import MemoryLimit

    peak = planned.prediction.peaks[0]
    return MemoryLimit(
        tensor_bytes=peak.peak_bytes - peak.by_class["runtime"],
        budget_bytes=planned.request.memory or planned.machine.device.memory.capacity_bytes,
    )


def _training_loop(
    planned: Planned,
    stack: "LayerStack",
    batches: "TrainingBatches",
    program: Program,
    folder: Path,
    checkpoint: "Checkpoint | None",
    device: "Device",
    hooks: LoopHooks,
) -> Generator[Step]:
    """The training loop of one rank, which a verification may stop and start again."""
    instrumentation = hooks.instrumentation
    after = instrumentation.restart_after if instrumentation else None
    if after is None:
        return _attempt(planned, stack, batches, program, folder, checkpoint, device, hooks)
    from windlass.runtime import train_with_restart

    def start(checkpoint: "Checkpoint | None", stop: Callable[[], bool]) -> Generator[Step]:
        # A new model each time: only the files may connect the two attempts.
        stopped = replace(hooks, stop=stop)
        new = _new_stack(planned, checkpoint)
        return _attempt(planned, new, batches, program, folder, checkpoint, device, stopped)

    return train_with_restart(start, stack, folder, after=after, stop=hooks.stop)


def _attempt(
    planned: Planned,
    stack: "LayerStack",
    batches: "TrainingBatches",
    program: Program,
    folder: Path,
    checkpoint: "Checkpoint | None",
    device: "Device",
    hooks: LoopHooks,
) -> Generator[Step]:
    """One attempt at a rank's training; rank 0 also saves the measured timeline of one step."""
    from windlass.runtime import RankContext, TimelineRecorder, train_loop

    rank, instrumentation = program.device, hooks.instrumentation
    done = checkpoint.manifest.step if checkpoint else 0
    recorded = min(done + _RECORDED_STEP, planned.request.train.steps)

    def save_timeline(step: int, timeline: Timeline) -> None:
        del step
        timeline.save(folder / MEASURED_TIMELINE_FILE)

    recorder = TimelineRecorder(steps=frozenset({recorded}), record=save_timeline)
    context = RankContext(
        plan=planned.plan,
        stack=stack,
        program=program,
        settings=planned.request.train,
        checkpoints=folder / CHECKPOINT_FOLDER,
        graph=planned.graph if planned.plan.parallel.devices > 1 else None,
        device=device,
        memory_limit=_memory_limit(planned),
        tasks=load_run_tasks(folder, stack.max_sequence),
    )
    return train_loop(
        context,
        batches,
        resume=checkpoint,
        stop=hooks.stop,
        recorder=None if rank else recorder,
        heartbeat=hooks.heartbeat,
        wrap_handlers=instrumentation.handler_wrapper(folder, rank) if instrumentation else None,
    )
