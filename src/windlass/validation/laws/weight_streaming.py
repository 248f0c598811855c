"""Streams: one large device through which weights pass from a memory outside.

A step reads each weight twice and sends its gradient back once, over the device's links, while the
whole batch is computed: the longer of the two counts.
"""

from collections.abc import Mapping

import numpy as np

from windlass.validation.laws.formulas import Column, Number, smooth_max, step_flop
from windlass.validation.runs import Columns


def step_terms(runs: Columns, given: Mapping[str, Number]) -> dict[str, Column]:
    """Seconds of a step by what they go into; the step takes their sum.

    Args:
        runs: as columns.
        given: the constants of `priors.toml`, law `stream`.
    """
    k = {name: np.asarray(value, dtype=float) for name, value in given.items()}
    weights = runs.layers * runs.block + runs.table
    tokens = runs.micro * runs.accumulation * runs.sequence * runs.replicas
    flop = step_flop(tokens, weights, runs.layers, runs.width, runs.sequence)
    products = flop / runs.devices / (runs.peak * k["products"])
    moved = 3.0 * 2.0 * weights / (runs.inner * k["arriving"])
    both = smooth_max(products, moved)
    return {
        "products": products,
        "arriving": both - products,
        "fixed": np.zeros_like(products) + k["fixed"],
    }
