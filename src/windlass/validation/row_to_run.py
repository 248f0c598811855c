"""Turns rows of a table into published runs, or states why a row cannot become one."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from windlass.validation.clusters import find_cluster, find_host_family
from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    at_most,
    check_numbers,
    leading_count,
    read_count,
    read_number,
    read_word,
    required_numbers,
    shown_cell,
)
from windlass.validation.image_runs import image_model, image_run_config, image_shape
from windlass.validation.ipu_runs import ipu_run_config
from windlass.validation.published_run import ModelShape, PublishedRun, RunConfig
from windlass.validation.run_configs import run_configs

_GIGABYTE, _GIB = 1e9, 2.0**30
_TOKENS = re.compile(r"tokens/s", re.IGNORECASE)
_OUTCOMES = {"": False, "ok": False, "oom": True}
_HOSTS = re.compile(r"(\d+)x\S+x(\d+)A\d+")
"""MLPerf's name of a system of several hosts: `2xXE8545x4A100-SXM-40GB` is 2 hosts of 4 devices."""
_PER_DEVICE = re.compile(r"/(GPU|device)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row that cannot become a run, with the reason."""

    line: int
    model: str
    device: str
    reason: str


def rows_to_runs(rows: Sequence[TableRow]) -> list[PublishedRun | SkippedRow]:
    """The run that each row of a table describes, in the order of the rows.

    Args:
        rows: all rows of one table; a row may lack attention heads that others of its width state.
    """
    heads = _usual_heads(rows)
    runs: list[PublishedRun | SkippedRow] = []
    for row in rows:
        try:
            runs.append(_run(row, heads))
        except UnusableRow as reason:
            runs.append(
                SkippedRow(
                    line=row.line, model=row.text("model"), device=row.text("device"),
                    reason=str(reason),
                )
            )  # fmt: skip
    return runs


_IPU_HOSTS = ("bow-2000", "ipu-m2000")


def _run(row: TableRow, heads: Mapping[float, float]) -> PublishedRun:
    family = find_host_family(row)
    if family is None:
        raise UnusableRow(
            f"device {row.text('device')!r} is not known; `windlass machines` lists those that are"
        )
    check_numbers(row)
    assumptions: list[str] = []
    cluster, image = find_cluster(row), image_model(row.text("model"))
    if image is not None:
        shape, configs = image_shape(image), [image_run_config(row)]
    else:
        shape = model_shape(row, heads, assumptions)
        if cluster.filled != 1.0:
            shape = replace(shape, sequence=shape.sequence * cluster.filled)
        if family in _IPU_HOSTS:
            configs = [ipu_run_config(row, shape, assumptions)]
        else:
            configs = run_configs(row, shape, cluster, assumptions)
    out_of_memory = read_word(row, "outcome", _OUTCOMES, "`ok` or `OOM`")
    seconds = None if out_of_memory else _step_seconds(row, shape, configs[0])
    peak = _peak_bytes(row)
    if seconds is None and peak is None and not out_of_memory:
        raise UnusableRow("no step time, throughput or peak memory is published")
    return PublishedRun(
        line=row.line,
        key=row.key,
        model=row.text("model"),
        machine=f"{row.text('device')} x {configs[0].devices:g}",
        family=family,
        cluster=cluster,
        shape=shape,
        config=configs[0],
        per_host=_devices_per_host(row, configs[0].devices),
        candidates=tuple(configs) if len(configs) > 1 else (),
        step_seconds=seconds,
        peak_bytes=peak,
        out_of_memory=out_of_memory,
        assumptions=tuple(assumptions),
        unread=row.unread,
    )


def _devices_per_host(row: TableRow, devices: float) -> float | None:
    """Devices of each host if the system's name states them consistently, else None."""
    match = _HOSTS.match(row.peek("system"))
    if not match or float(match[1]) * float(match[2]) != devices:
        return None
    row.text("system")  # read, as it counts
    return float(match[2])


def _usual_heads(rows: Sequence[TableRow]) -> dict[float, float]:
    """Width -> the most frequent number of heads in rows of that width, the first among equals."""
    stated: dict[float, Counter[float]] = {}
    for row in rows:
        try:
            width, heads = read_number(row, "hidden"), read_number(row, "heads")
        except UnusableRow:
            continue
        if width and heads:
            stated.setdefault(width, Counter())[heads] += 1
    return {width: counts.most_common(1)[0][0] for width, counts in stated.items()}


def _step_seconds(row: TableRow, shape: ModelShape, config: RunConfig) -> float | None:
    """Measured seconds of a step, computed from the throughput if no time is given."""
    seconds = read_number(row, "measured_step_s")
    if seconds:
        return seconds
    throughput, unit = read_number(row, "measured_throughput"), row.text("throughput_unit")
    if not throughput or not unit:
        return None
    (batch,) = required_numbers(row, "global_batch")
    items = batch * (shape.sequence if _TOKENS.search(unit) else 1.0)
    return items / (throughput * (config.devices if _PER_DEVICE.search(unit) else 1.0))


def _peak_bytes(row: TableRow) -> float | None:
    gigabytes, gib = read_number(row, "peak_memory_gb"), read_number(row, "peak_memory_gib")
    if gigabytes:
        return gigabytes * _GIGABYTE
    return gib * _GIB if gib else None


_IMAGE_MODELS = re.compile(r"resne|efficientnet|vit|dit-|unet|gnn", re.IGNORECASE)
_EXPERTS = re.compile(r"\bMoE\b")
_EXPERT_COLUMNS = {
    "experts": 1, "expert_parallel": 1, "experts_per_token": 0, "expert_ffn": 0, "shared_ffn": 0,
    "dense_layers": 0,
}  # fmt: skip
"""Columns of experts with the largest number that a dense model may state."""
_NO_EXPERTS = "no stack's graph has its experts and exchanges"
_ATTENTION = ("", "mha", "gqa")
_GATED_MODELS = re.compile(r"llama|mistral|smollm", re.IGNORECASE)
_MASKED_MODELS = re.compile(r"bert", re.IGNORECASE)
_VOCABULARY = 50257.0
_MASKED_VOCABULARY = 30522.0
"""Vocabularies of GPT-2 and of BERT."""
_MASKED_SHARE = 0.15
"""Share of positions that a masked model predicts. Source: Devlin et al. 2019, arXiv:1810.04805."""
_GATED_MULTIPLE = 256.0
_SAME_SHAPE, _SAME_HEAD, _OTHER_MODEL = 0.05, 0.01, 0.25
"""Differences between the parameters of a shape and those that a row states: rounding of a name
such as `7B`; so near that another head explains it; so far that it is no such model."""


def model_shape(
    row: TableRow, usual_heads: Mapping[float, float], assumptions: list[str]
) -> ModelShape:
    """The shape of a row's model.

    Args:
        usual_heads: width -> heads, for rows that do not state heads.

    Raises:
        UnusableRow: the model is not a transformer, or its size is not published.
    """
    name = row.text("model")
    if _IMAGE_MODELS.search(name):
        raise UnusableRow(
            "an image model other than ResNet-50; no constants are fitted for its convolutions"
        )
    width, sequence = required_numbers(row, "hidden", "seq")
    heads = _heads(row, width, usual_heads, assumptions)
    _require_dense(row, width / heads)
    masked = bool(_MASKED_MODELS.search(name))
    stated = leading_count(row, "vocab")
    vocabulary = stated or (_MASKED_VOCABULARY if masked else _VOCABULARY)
    if stated is None:
        assumptions.append(f"vocabulary of {vocabulary:g} assumed")
    gated = bool(read_number(row, "ffn")) or bool(_GATED_MODELS.search(name))
    ffn = read_number(row, "ffn") or (_gated_width(width) if gated else 4.0 * width)
    kv_head_share = (read_count(row, "kv_heads") or heads) / heads
    shape = ModelShape(
        layers=1.0, width=width, heads=heads, sequence=sequence, vocabulary=vocabulary,
        kv_head_share=kv_head_share, ffn=ffn, ffn_matrices=3.0 if gated else 2.0,
        vocabulary_matrices=2.0 if gated else 1.0,
        head_position_share=_MASKED_SHARE if masked else 1.0,
    )  # fmt: skip
    layers = read_count(row, "layers")
    if layers is None:
        return replace(shape, layers=_layers_from_parameters(row, shape, assumptions))
    return _as_many_parameters(row, replace(shape, layers=layers), assumptions)


def _require_dense(row: TableRow, head_width: float) -> None:
    """Refuses what a row says of its model and no stack's graph computes."""
    for column in _EXPERT_COLUMNS:
        if (read_number(row, column) or 0) > _EXPERT_COLUMNS[column]:
            raise UnusableRow(f"a mixture of experts ({shown_cell(row, column)}); {_NO_EXPERTS}")
    if _EXPERTS.search(row.text("notes")):
        raise UnusableRow(f"a mixture of experts, by its notes; {_NO_EXPERTS}")
    if read_number(row, "lora_rank"):
        raise UnusableRow(
            f"{shown_cell(row, 'lora_rank')}: adapters; no stack's graph has frozen weights"
        )
    attention = row.text("attention").lower()
    if attention not in _ATTENTION:
        raise UnusableRow(f"{shown_cell(row, 'attention')} is computed by no stack's graph")
    if attention == "gqa":
        required_numbers(row, "kv_heads")
    stated = read_number(row, "head_dim")
    if stated and stated != head_width:
        raise UnusableRow(
            f"`head_dim` = {stated:g}, and width over heads is {head_width:g}, as in every stack's "
            "graph"
        )


def _as_many_parameters(row: TableRow, shape: ModelShape, assumptions: list[str]) -> ModelShape:
    """The shape, with the gates and the separate head that `params` tells it has."""
    parameters = read_number(row, "params")
    if not parameters:
        if read_number(row, "ffn") and not _GATED_MODELS.search(row.text("model")):
            assumptions.append("a gated feed-forward network assumed")
        return shape
    matrices = (3.0, 2.0) if read_number(row, "ffn") else (shape.ffn_matrices,)
    readings = [
        replace(shape, ffn_matrices=ffn, vocabulary_matrices=vocabulary)
        for ffn in matrices
        for vocabulary in (1.0, 2.0)
    ]
    nearest = min((shape, *readings), key=lambda each: abs(each.parameters / parameters - 1))
    if abs(shape.parameters / parameters - 1) <= _SAME_SHAPE:
        return shape
    positions = shape.sequence * shape.width  # a table of learned ones, which costs no product
    if abs((shape.parameters + positions) / parameters - 1) <= _SAME_HEAD:
        return shape
    factor = nearest.parameters / parameters
    if abs(factor - 1) <= _SAME_SHAPE and nearest.ffn_matrices != shape.ffn_matrices:
        assumptions.append("no gate in the feed-forward network, by its parameters")
        return nearest
    if abs(factor - 1) <= _SAME_HEAD:
        head = "of its own" if nearest.vocabulary_matrices > 1 else "tied to the embedding"
        assumptions.append(f"a head {head}, by its parameters")
        return nearest
    stated = f"{shape.parameters / 1e9:.3g} billion parameters, and `params` says "
    stated += f"{parameters / 1e9:.3g} billion"
    if abs(factor - 1) > _OTHER_MODEL:
        raise UnusableRow(f"the shape has {stated}, as of another model")
    assumptions.append(f"the shape has {stated}")
    return shape


def _gated_width(width: float) -> float:
    """`8/3 d`, rounded up to a multiple of 256. Source: Touvron et al. 2023, arXiv:2302.13971."""
    return float(-(-8.0 * width / 3.0 // _GATED_MULTIPLE) * _GATED_MULTIPLE)


def _heads(
    row: TableRow, width: float, usual: Mapping[float, float], assumptions: list[str]
) -> float:
    stated = read_count(row, "heads")
    if stated:
        return stated
    heads = usual.get(width) or max(1.0, round(width / 128.0))
    assumptions.append(f"{heads:g} heads assumed")
    return heads


def _layers_from_parameters(row: TableRow, shape: ModelShape, assumptions: list[str]) -> float:
    """Layers that come nearest to the published parameters, a multiple of the pipeline stages."""
    (parameters,) = required_numbers(row, "params")
    stages = read_count(row, "p") or 1.0
    blocks = (parameters - shape.vocabulary_parameters) / shape.parameters_per_block
    layers = max(1.0, round(blocks / stages)) * stages
    at_most("layers", layers)
    billions = parameters / 1e9
    assumptions.append(f"{layers:g} layers computed from {billions:.3g} billion parameters")
    return layers
