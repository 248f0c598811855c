"""Peak memory of a GPU run on its fullest device.

Two stages are candidates: the first keeps the activations of as many micro-batches as there are
stages, the last those of one micro-batch and its logits.
"""

from collections.abc import Mapping

import numpy as np

from windlass.validation.formulas import Column, ColumnOrFloat, activation_bytes
from windlass.validation.laws.gpu import stage_layers
from windlass.validation.published_run import RunColumns

_FLOAT32 = 4.0


def peak_bytes(runs: RunColumns, given: Mapping[str, ColumnOrFloat]) -> Column:
    """Bytes that the process of the fullest device holds at its fullest moment.

    Args:
        runs: as columns.
        given: the constants of `priors.toml`, `memory`.
    """
    k = {name: np.asarray(value, dtype=float) for name, value in given.items()}
    full, last = stage_layers(runs)
    only = runs.pipeline == 1
    first_table = runs.vocabulary_parameters / runs.vocabulary_matrices
    last_table = np.where(only, runs.vocabulary_parameters, first_table)
    first = _state(runs, full, first_table, k) + _activations(runs, full, runs.pipeline, k)
    final = _state(runs, last, last_table, k) + _activations(runs, last, np.ones_like(full), k)
    fullest = np.where(only, 0.0, first)
    return np.asarray(
        np.maximum(fullest, final + _logits(runs, k)) * k["slack"] + k["buffers"] + k["context"],
        dtype=float,
    )


def _state(runs: RunColumns, layers: Column, table: Column, k: dict[str, Column]) -> Column:
    """Bytes of weights, gradients and optimizer state, sharded as the ZeRO stage says."""
    weights = (layers * runs.parameters_per_block + table) / runs.tensor
    sharers = runs.replicas * runs.context
    gradient = np.where(runs.fp32_gradients > 0, 2.0 + _FLOAT32, k["gradient_held"])
    whole = np.where(runs.zero >= 3, 0.0, 2.0 + np.where(runs.zero >= 2, 0.0, gradient))
    shared = (
        k["state"]
        + np.where(runs.zero >= 3, _FLOAT32, 0.0)
        + np.where(runs.zero == 2, gradient, 0.0)
    )
    shared = shared / np.where(runs.zero >= 1, sharers, 1.0)
    # In a pipeline, weights and gradients stay whole for all micro-batches of a step.
    whole_weights = (
        np.where(runs.pipeline > 1, layers, k["gathered"]) * runs.parameters_per_block / runs.tensor
    )
    held = np.where(runs.pipeline > 1, 2.0 + _FLOAT32, 2.0)
    gathered = np.where(runs.zero >= 3, whole_weights * held, 0.0)
    return np.asarray(weights * (whole + shared) + gathered, dtype=float)


def _activations(runs: RunColumns, layers: Column, stages: Column, k: dict[str, Column]) -> Column:
    """Bytes of the micro-batches in flight on a stage and of the running layer."""
    tokens = runs.micro * runs.sequence / runs.context
    under_way = np.minimum(stages, runs.accumulation)
    under_way = under_way + np.where(
        (runs.virtual_stages > 1) & (stages > 1), (stages - 1.0) / runs.virtual_stages, 0.0
    )
    slices = np.where(runs.sequence_parallel > 0, runs.tensor, 1.0)
    kept = 2.0 * tokens * runs.width / slices
    whole = activation_bytes(
        tokens, runs.width, runs.heads, runs.sequence, runs.tensor,
        cut_sequence=runs.sequence_parallel, scores=k["scores"] * (1.0 - runs.selective_recompute),
    )  # fmt: skip
    partly = (runs.recompute_share > 0) & (runs.recompute_share < 1)
    each = np.where(partly, tokens * runs.width / runs.tensor * k["kept_partly"], whole)
    each = np.where(runs.recompute_share == 1, kept, each)
    # The layer that runs: what it makes again, what it gathers from slices, and gradients.
    running = (runs.recompute_share > 0) * whole + tokens * runs.width * k["running"]
    return np.asarray((under_way * layers * each + running) * k["activations"], dtype=float)


def _logits(runs: RunColumns, k: dict[str, Column]) -> Column:
    tokens = runs.micro * runs.sequence / runs.context * runs.head_position_share
    return np.asarray(tokens * runs.vocabulary / runs.tensor * k["logits"], dtype=float)
