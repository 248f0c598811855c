"""A plan as flat facts that engines have words for, and the plan that such facts describe."""

from collections.abc import Mapping, Set as AbstractSet
from dataclasses import asdict
from typing import get_args

from windlass.engines.engine_file import Scalar
from windlass.errors import PlanError
from windlass.models import ExpertConfig, TransformerConfig
from windlass.schema import (
    Batch,
    Graph,
    Machine,
    ModelIdentity,
    Parallelism,
    Plan,
    Recompute,
    ShardingDegrees,
    Stage,
    TrainSettings,
)

Fact = Scalar | tuple[tuple[int, int], ...] | None
"""A value; ranges of layers for `stages`; None where there is nothing to say."""

NEUTRAL: Mapping[str, Fact] = {
    "parallel.context": 1, "parallel.expert": 1, "parallel.pipeline": 1, "parallel.tensor": 1,
    "parallel.schedule": None, "parallel.virtual_stages": 1, "sharding.kind": "none",
    "sharding.reshard": False, "sharding.instances": 1, "recompute": "none",
    "recompute_layers": None, "recompute_rest": None, "moments": "float32",
    "master_weights": True, "ema": None, "step_graph": False, "deterministic": False,
    "loss": "plain", "attention": "flash", "products": None, "offload.parameters": "device",
    "offload.gradients": "device", "offload.optimizer": "device", "offload.activations": "device",
    "stages": None, "sparsity": None, "lora": None, "frozen": None, "optimizer": "adamw",
}  # fmt: skip
"""Facts that an engine need not have a word for while they have these values."""

_UNSAID_FIELDS = frozenset(
    {"name", "source", "sequence", "split_blocks", "sparsity", "experts", "head_dim"}
)


def plan_facts(plan: Plan, train: TrainSettings, config: TransformerConfig) -> dict[str, Fact]:
    """What a plan, its training and its model say, by dotted name."""
    return {**_layout_facts(plan), **_state_facts(plan), **_train_facts(train), **_model(config)}


def _layout_facts(plan: Plan) -> dict[str, Fact]:
    parallel, sharding, batch = plan.parallel, plan.sharding, plan.batch
    context, is_piped = parallel.context or 1, parallel.pipeline > 1
    kind = (
        "parameters" if sharding.parameters > 1
        else "optimizer" if sharding.optimizer > 1 else "none"
    )  # fmt: skip
    degree = sharding.parameters if kind == "parameters" else 1
    return {
        "parallel.pipeline": parallel.pipeline,
        "parallel.tensor": str(parallel.tensor) if "x" in str(parallel.tensor) else parallel.tensor,
        "parallel.context": context,
        "parallel.expert": parallel.expert_degree,
        "parallel.expert_in_shard": degree * parallel.tensor % parallel.expert_degree == 0,
        "parallel.expert_by_tensor": not parallel.expert or not parallel.expert % parallel.tensor,
        "parallel.sequence": parallel.tensor > 1,
        "parallel.ranks": parallel.devices,
        "parallel.data": parallel.data,
        "parallel.schedule": parallel.schedule if is_piped else None,
        "parallel.virtual_stages": parallel.virtual_stages,
        "sharding.kind": kind,
        "sharding.shard": max(1, degree // context),
        "sharding.replicate": parallel.replicas // max(degree, context),
        "sharding.instances": parallel.replicas // sharding.optimizer if kind == "optimizer" else 1,
        "sharding.of_context": "whole" if not degree % context else "part",
        "sharding.whole": sharding.optimizer in (1, parallel.replicas),
        "sharding.reshard": bool(sharding.reshard),
        "sharding.resharded": kind != "parameters" or bool(sharding.reshard),
        "batch.sequence": batch.sequence,
        "batch.positions": batch.sequence,
        "batch.micro": batch.micro,
        "batch.accumulation": batch.accumulation,
        "batch.local": batch.sequences_per_replica if is_piped else batch.micro,
        "batch.pipeline_micro": batch.micro if is_piped else None,
        "batch.global": plan.global_batch,
        "stages": tuple((s.first_layer, s.end_layer) for s in plan.stages) if is_piped else None,
        "recompute": plan.recompute,
        **_recompute_words(plan),
        "recompute_rest": _agreed(frozenset(stage.recompute_rest for stage in plan.stages)),
    }


def _recompute_words(plan: Plan) -> dict[str, Fact]:
    """Recomputed layers of each stage, also as Megatron counts them for whole layers."""
    layers = _agreed(frozenset(stage.recompute_layers for stage in _recomputing(plan)))
    is_full, is_part = plan.recompute == "full", layers is not None
    return {
        "recompute_layers": layers,
        "recompute_partial": plan.recompute if is_part else None,
        "recompute_method": ("block" if is_part else "uniform") if is_full else None,
        "recompute_count": (layers if is_part else 1) if is_full else None,
    }


def _recomputing(plan: Plan) -> list[Stage]:
    """Stages with blocks; those with the embedding or the head alone have none to recompute."""
    last = plan.stages[-1].end_layer - 1
    return [
        stage if stage.recompute == plan.recompute
        else stage.model_copy(update={"recompute_layers": 0})
        for stage in plan.stages
        if max(stage.first_layer, 1) < min(stage.end_layer, last)
    ]  # fmt: skip


def _agreed(values: AbstractSet[Scalar | None]) -> Fact:
    """What all stages have; `differs` where they do not agree."""
    return next(iter(values)) if len(values) == 1 else "differs" if values else None


def _state_facts(plan: Plan) -> dict[str, Fact]:
    model = plan.model or ModelIdentity()
    return {
        "precision": plan.precision, "compile": plan.compile, "clip": plan.clip,
        "optimizer": plan.optimizer or "adamw", "moments": plan.moments,
        "master_weights": plan.master_weights is None, "ema": plan.ema,
        "step_graph": bool(plan.step_graph), "deterministic": bool(plan.deterministic),
        "loss": plan.loss or "plain", "attention": plan.attention or "flash",
        "products": plan.products, **{f"offload.{k}": v for k, v in dict(plan.offload).items()},
        "sparsity": None if model.sparsity is None else "set",
        "lora": None if model.lora is None else model.lora.rank,
        "frozen": None if model.frozen is None else ", ".join(model.frozen),
    }  # fmt: skip


def _train_facts(train: TrainSettings) -> dict[str, Fact]:
    beta1, beta2 = train.betas
    return {
        "train.steps": train.steps, "train.learning_rate": train.learning_rate,
        "train.warmup_steps": round(train.warmup * train.steps), "train.schedule": train.schedule,
        "train.final_share": train.final_rate,
        "train.final_rate": train.final_rate * train.learning_rate,
        "train.beta1": beta1, "train.beta2": beta2, "train.epsilon": train.epsilon,
        "train.weight_decay": train.weight_decay, "train.seed": train.seed,
        "train.clip": 0.0 if train.clip is None else train.clip,
    }  # fmt: skip


def _model(config: TransformerConfig) -> dict[str, Fact]:
    """The sizes of a model; those that no word of an engine's covers must be as by default."""
    named: dict[str, Fact] = {"model.name": config.name, "model.head_width": config.head_width}
    fields: dict[str, Fact] = {
        f"model.{key}": value
        for key, value in asdict(config).items()
        if key not in _UNSAID_FIELDS and not isinstance(value, dict | tuple | list)
    }
    if config.experts is not None:
        fields |= {f"model.experts.{key}": value for key, value in asdict(config.experts).items()}
    for key in ("rope_scaling", "sliding_window"):
        if getattr(config, key) is not None:
            fields[f"model.{key}"] = "set"
    return named | fields


def neutral(name: str) -> tuple[bool, Fact]:
    """Whether a fact has a value that needs no word, and that value."""
    if name.startswith("model."):
        kind = ExpertConfig if name.startswith("model.experts.") else TransformerConfig
        field = kind.__dataclass_fields__.get(name.rpartition(".")[2])
        value: object = None if field is None else field.default
        plain = value if isinstance(value, bool | int | float | str) else None
        return field is not None and value in (plain, None), plain
    return name in NEUTRAL, NEUTRAL.get(name)


def plan_of_facts(
    facts: Mapping[str, Fact], graph: Graph, machine: Machine, stack: str, model: ModelIdentity
) -> Plan:
    """The plan that facts of a configuration describe, on all devices of a machine.

    Args:
        facts: what the configuration says; what it leaves open is as in `NEUTRAL`.
        graph: the model, as the stack computes it.
        machine: gives the number of ranks where the configuration does not.
        stack: name of the stack that the plan is for.
        model: what the graph was captured from.

    Raises:
        PlanError: the degrees do not go together, or a size of the batch is missing.
    """
    said = {name: value for name, value in facts.items() if value is not None}
    parallel = _parallelism(said, machine.devices)
    context = parallel.context or 1
    optimizer = said.get("optimizer", "adamw")
    content = {
        "graph": graph.label, "machine": machine.label, "stack": stack, "model": model,
        "precision": said.get("precision", "bfloat16"), "compile": said.get("compile", False),
        "clip": bool(said.get("train.clip", said.get("clip", True))), "parallel": parallel,
        "optimizer": None if optimizer == "adamw" else optimizer,
        "sharding": _sharding(said, parallel.replicas, context),
        "batch": _batch(said, data=parallel.data, is_piped=parallel.pipeline > 1),
        "stages": _stages(said, graph.layers, parallel.pipeline * parallel.virtual_stages),
    }  # fmt: skip
    return Plan.model_validate(content)


def _parallelism(said: Mapping[str, Fact], devices: int) -> Parallelism:
    names = ("pipeline", "tensor", "context", "expert", "virtual_stages")
    counts = {name: _count(said, f"parallel.{name}") for name in names}
    if isinstance(stages := said.get("stages"), tuple):
        counts["virtual_stages"] = max(1, len(stages) // counts["pipeline"])
    each = counts["pipeline"] * counts["tensor"] * counts["context"]
    shard = _count(said, "sharding.shard", least=-1) if "sharding.shard" in said else -1
    if "parallel.data" in said:
        data = _count(said, "parallel.data")
    elif "sharding.replicate" in said and shard > 0:
        data = _count(said, "sharding.replicate") * shard
    elif devices % each:
        raise PlanError(
            f"tensor x pipeline x context parallelism of {each} ranks does not divide the "
            f"machine's {devices} devices; name the machine that the configuration is for by `--on`"
        )
    else:
        data = devices // each
    schedule = said.get("parallel.schedule")
    if schedule is None or counts["virtual_stages"] > 1:
        schedule = "interleaved" if counts["virtual_stages"] > 1 else "1f1b"
    optional = {k: None if counts[k] == 1 else counts[k] for k in ("context", "expert")}
    return Parallelism.model_validate({**counts, **optional, "data": data, "schedule": schedule})


def _sharding(said: Mapping[str, Fact], replicas: int, context: int) -> ShardingDegrees:
    shard = _count(said, "sharding.shard", least=-1) if "sharding.shard" in said else 1
    degree = shard * context if shard > 0 else replicas // _count(said, "sharding.replicate")
    kind = said.get("sharding.kind", "parameters" if degree > 1 else "none")
    if kind != "none" and "sharding.shard" not in said:
        degree = replicas // _count(said, "sharding.instances")
    return ShardingDegrees(
        parameters=degree if kind == "parameters" else 1,
        optimizer=1 if kind == "none" else degree,
        reshard=True if said.get("sharding.reshard") and kind == "parameters" else None,
    )


def _batch(said: Mapping[str, Fact], *, data: int, is_piped: bool) -> Batch:
    local = said.get("batch.local")
    micro = said.get("batch.pipeline_micro") if is_piped else None
    size = _count({"batch.micro": said.get("batch.micro", micro or local)}, "batch.micro")
    count = said.get("batch.accumulation")
    if count is None and "batch.global" in said:
        count = _count(said, "batch.global") // (size * data)
    sequence = _count({"batch.sequence": said.get("batch.sequence")}, "batch.sequence")
    return Batch(
        sequence=sequence, micro=size,
        accumulation=_count({"batch.accumulation": count}, "batch.accumulation"),
    )  # fmt: skip


def _stages(said: Mapping[str, Fact], layers: int, chunks: int) -> tuple[Stage, ...]:
    ranges = said.get("stages") if chunks > 1 else ((0, layers),)
    ranges = ranges if isinstance(ranges, tuple) else even_ranges(layers, chunks)
    mode = said.get("recompute", "none")
    counted = said.get("recompute_count") if said.get("recompute_method") == "block" else None
    stages = []
    for first, end in ranges:
        has_blocks = max(first, 1) < min(end, layers - 1)
        count = counted if has_blocks and mode != "none" else None
        recompute = {"recompute": mode if has_blocks else "none", "recompute_layers": count}
        stages.append(Stage.model_validate({"phases": ((first, end),), **recompute}))
    return tuple(stages)


def even_ranges(layers: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Ranges of layers with as many blocks in each; the first ones have one more.

    The embedding is with the first and the head with the last.
    """
    each, more = divmod(layers - 2, chunks)
    ends = [1 + (index + 1) * each + min(index + 1, more) for index in range(chunks)]
    ends[-1] = layers
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _count(facts: Mapping[str, Fact], name: str, *, least: int = 1) -> int:
    value = facts.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(
            f"the configuration does not say `{name}`" if value is None else
            f"the configuration says `{name}` = {value!r}, no whole number of at least {least}"
        )  # fmt: skip
    return value


def sayable_edits(plan: Plan, fact: str) -> tuple[Plan, ...]:
    """Plans as near that say a fact as every engine can; none if there is none."""
    if fact in ("recompute", "recompute_layers", "recompute_partial", "recompute_rest"):
        return tuple(_recomputing_all(plan, mode) for mode in get_args(Recompute))
    edited = _edited(plan, fact)
    return () if edited is None else (edited,)


def _recomputing_all(plan: Plan, mode: Recompute) -> Plan:
    """The plan with all blocks recomputed in one way."""
    layers, stages = plan.stages[-1].end_layer, []
    for stage in plan.stages:
        has_blocks = max(stage.first_layer, 1) < min(stage.end_layer, layers - 1)
        way = {"recompute": mode if has_blocks else "none"}
        whole = {"recompute_layers": None, "recompute_rest": None}
        stages.append(stage.model_copy(update=way | whole))
    return plan.model_copy(update={"stages": tuple(stages)})


def _edited(plan: Plan, fact: str) -> Plan | None:
    if fact == "parallel.schedule":
        parallel = plan.parallel.model_copy(update={"schedule": "1f1b"})
        return plan.model_copy(update={"parallel": parallel})
    if fact == "sharding.resharded":
        reshard = plan.sharding.model_copy(update={"reshard": True})
        return plan.model_copy(update={"sharding": reshard})
    if fact in ("sharding.of_context", "sharding.whole", "parallel.expert_in_shard"):
        replicas = plan.parallel.replicas
        degrees = {"parameters": replicas, "optimizer": replicas}
        return plan.model_copy(update={"sharding": plan.sharding.model_copy(update=degrees)})
    return plan.model_copy(update={"precision": "bfloat16"}) if fact == "precision" else None
