"""Peak memory of a GPU run on its fullest device, from what is alive at its fullest moment.

Two stages are candidates: the first holds the layers' inputs of as many micro-batches as there are
stages, the last one's of one and the logits.
"""

from collections.abc import Mapping

import numpy as np

from windlass.validation.laws.formulas import Column, Number, activation_bytes
from windlass.validation.laws.gpu import stage_layers
from windlass.validation.runs import Columns

_FLOAT32 = 4.0


def peak_bytes(runs: Columns, given: Mapping[str, Number]) -> Column:
    """Bytes that the process of the fullest device holds at its fullest moment.

    Args:
        runs: as columns.
        given: the constants of `priors.toml`, `memory`.
    """
    k = {name: np.asarray(value, dtype=float) for name, value in given.items()}
    full, last = stage_layers(runs)
    only = runs.pipeline == 1
    first_table = runs.table / runs.tables
    last_table = np.where(only, runs.table, first_table)
    first = _state(runs, full, first_table, k) + _activations(runs, full, runs.pipeline, k)
    final = _state(runs, last, last_table, k) + _activations(runs, last, np.ones_like(full), k)
    fullest = np.where(only, 0.0, first)
    return np.asarray(
        np.maximum(fullest, final + _logits(runs, k)) * k["slack"] + k["buffers"] + k["context"],
        dtype=float,
    )


def _state(runs: Columns, layers: Column, table: Column, k: dict[str, Column]) -> Column:
    """Weights, gradients and optimizer state, each shared as ZeRO says."""
    weights = (layers * runs.block + table) / runs.tensor
    sharers = runs.replicas * runs.context
    gradient = np.where(runs.wide_gradients > 0, 2.0 + _FLOAT32, k["gradient_held"])
    whole = np.where(runs.zero >= 3, 0.0, 2.0 + np.where(runs.zero >= 2, 0.0, gradient))
    shared = (
        k["state"]
        + np.where(runs.zero >= 3, _FLOAT32, 0.0)
        + np.where(runs.zero == 2, gradient, 0.0)
    )
    shared = shared / np.where(runs.zero >= 1, sharers, 1.0)
    # In a pipeline, weights and gradients stay whole for all micro-batches of a step.
    whole_weights = np.where(runs.pipeline > 1, layers, k["gathered"]) * runs.block / runs.tensor
    held = np.where(runs.pipeline > 1, 2.0 + _FLOAT32, 2.0)
    gathered = np.where(runs.zero >= 3, whole_weights * held, 0.0)
    return np.asarray(weights * (whole + shared) + gathered, dtype=float)


def _activations(runs: Columns, layers: Column, stages: Column, k: dict[str, Column]) -> Column:
    """Of the micro-batches that are under way on a stage, and of the layer that runs."""
    tokens = runs.micro * runs.sequence / runs.context
    under_way = np.minimum(stages, runs.accumulation)
    under_way = under_way + np.where(
        (runs.interleave > 1) & (stages > 1), (stages - 1.0) / runs.interleave, 0.0
    )
    slices = np.where(runs.cut_sequence > 0, runs.tensor, 1.0)
    kept = 2.0 * tokens * runs.width / slices
    whole = activation_bytes(
        tokens, runs.width, runs.heads, runs.sequence, runs.tensor,
        cut_sequence=runs.cut_sequence, scores=k["scores"] * (1.0 - runs.attention_again),
    )  # fmt: skip
    partly = (runs.again > 0) & (runs.again < 1)
    each = np.where(partly, tokens * runs.width / runs.tensor * k["kept_partly"], whole)
    each = np.where(runs.again == 1, kept, each)
    # The layer that runs: what it makes again, what it gathers from slices, and gradients.
    running = (runs.again > 0) * whole + tokens * runs.width * k["running"]
    return np.asarray((under_way * layers * each + running) * k["activations"], dtype=float)


def _logits(runs: Columns, k: dict[str, Column]) -> Column:
    tokens = runs.micro * runs.sequence / runs.context * runs.scored
    return np.asarray(tokens * runs.vocabulary / runs.tensor * k["logits"], dtype=float)
