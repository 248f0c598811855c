"""Step time of weight streaming: one large device that reads its weights from external memory.

A step reads each weight twice and sends its gradient back once over the device's links, while the
whole batch is computed. The longer of the two counts.
"""

from collections.abc import Mapping

import numpy as np

from windlass.validation.formulas import Column, ColumnOrFloat, smooth_max, step_flop
from windlass.validation.published_run import RunColumns


def step_terms(runs: RunColumns, given: Mapping[str, ColumnOrFloat]) -> dict[str, Column]:
    """Seconds of a step by term; their sum is the step time.

    Args:
        runs: as columns.
        given: the constants of `priors.toml`, law `weight_streaming`.
    """
    k = {name: np.asarray(value, dtype=float) for name, value in given.items()}
    weights = runs.layers * runs.parameters_per_block + runs.vocabulary_parameters
    tokens = runs.micro * runs.accumulation * runs.sequence * runs.replicas
    flop = step_flop(tokens, weights, runs.layers, runs.width, runs.sequence)
    products = flop / runs.devices / (runs.peak * k["products"])
    moved = 3.0 * 2.0 * weights / (runs.intra_host_rate * k["arriving"])
    both = smooth_max(products, moved)
    return {
        "products": products,
        "arriving": both - products,
        "fixed": np.zeros_like(products) + k["fixed"],
    }
