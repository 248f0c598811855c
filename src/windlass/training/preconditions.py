"""What must hold before a plan runs here: its machine, its stack, its model and its programs."""

from dataclasses import replace

from windlass.errors import DataError, MachineError, PlanError
from windlass.jobs import HERE, Planned, Progress
from windlass.models import find_model_folder, is_huggingface
from windlass.program import (
    Program,
    lower,
    require_valid_plan,
    runtime_gaps,
    verify_programs,
)
from windlass.schema import HOST_TIER, is_users_own
from windlass.training.legs import refuse_offloaded_masks


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


def require_engine(planned: Planned) -> None:
    """Refuses a plan for a software stack that only predicts.

    Raises:
        PlanError: nothing here trains plans for the stack.
    """
    stack = planned.machine.stack
    if stack is not None and stack.engine is None:
        gaps = runtime_gaps(planned.plan)
        lacks = f", and has no {' and no '.join(gaps)} yet" if gaps else ""
        raise PlanError(
            f"the plan is for the stack `{stack.name}`, which `plan` and `fit` predict; Windlass's "
            f"own runtime is another one{lacks}; plan without `--stack` to run it here, or with "
            "`--stack torch` on PyTorch's own distributed parts"
        )


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


def verified_programs(planned: Planned) -> tuple[Program, ...]:
    """The programs of all ranks, verified.

    Every run passes here, because a plan may come from a search or from an edited file.

    Raises:
        InputErrors: every rule that the plan breaks.
        PlanError: a program cannot be verified, the model keeps running statistics and is
            replicated or sharded, or its sequences cannot be divided.
    """
    plan, graph, machine = planned.plan, planned.graph, planned.machine
    require_valid_plan(plan, graph, machine, global_batch=planned.request.train.batch)
    refuse_offloaded_masks(planned)
    may_keep_statistics = graph.examples is not None or is_users_own(planned.request.model.name)
    is_engine = machine.stack is not None
    if may_keep_statistics and (is_engine or plan.parallel.devices > plan.parallel.pipeline):
        _refuse_running_statistics(planned)
    if plan.parallel.context is not None:
        _require_divisible_sequences(planned)
    programs, device = lower(plan, graph), machine.device
    capacities = {t.name: t.capacity_bytes for t in device.tiers if t.name == HOST_TIER}
    capacities[device.memory.name] = _tensor_budget_bytes(planned)
    verify_programs(programs, plan, graph, capacities)
    return programs


def _refuse_running_statistics(planned: Planned) -> None:
    """Refuses batch norms whose statistics several devices would each keep of their own part."""
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


def _require_divisible_sequences(planned: Planned) -> None:
    """Refuses context parallelism where tokens see others not by our attention alone."""
    from windlass.models import can_divide_sequences

    request = planned.request
    stack = planned.objects.stack(request.model_identity, seed=None)
    if not can_divide_sequences(stack.layers):
        raise PlanError(
            f"`parallel.context` = {planned.plan.parallel.context} needs the attention of the "
            f"catalogue's models, which gathers keys and values, and `{stack.name}` has other "
            "layers; leave `parallel.context` out, or use `parallel.data`"
        )


def _tensor_budget_bytes(planned: Planned) -> int:
    """Device memory for tensors: the budget less what the process takes before any tensor."""
    device = planned.machine.device
    budget_bytes = planned.request.memory or device.memory.capacity_bytes
    return budget_bytes - device.process_bytes(compiled=planned.plan.compile)


def note_sparse_kernels(planned: Planned, progress: Progress | None) -> Planned:
    """The plan with a note of what multiplies kept blocks, which is built now if it can be.

    Args:
        planned: what will be run; one without kept blocks is returned as it is.
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
