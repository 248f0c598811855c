"""Step time of image models under plain data parallelism.

A model is described by its FLOP and parameters (`models.toml`). A device reaches a share of its
peak that grows with its micro-batch.
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache

import numpy as np

from windlass.validation.csv_table import TableRow, read_count, read_number, required_numbers
from windlass.validation.formulas import Column, ColumnOrFloat, ring_bytes, ring_rate
from windlass.validation.published_run import ModelShape, RunColumns, RunConfig
from windlass.validation.software_stacks import FOLDER

_PASSES = 3.0
"""Passes of a step: one forward, and backward which costs two."""
_GRADIENT_BYTES = 2.0


def resnet_shape(row: TableRow) -> ModelShape | None:
    """The image model that a row names; None if it is not a known one."""
    for known in _models().values():
        if re.search(str(known["match"]), row.text("model"), re.IGNORECASE):
            return ModelShape(
                layers=0.0, width=1.0, heads=1.0, sequence=1.0, vocabulary=0.0,
                image_flop=float(known["flop"]), image_parameters=float(known["weights"]),
            )  # fmt: skip
    return None


@cache
def _models() -> Mapping[str, Mapping[str, str | float]]:
    return tomllib.loads((FOLDER / "models.toml").read_text(encoding="utf-8"))


def resnet_run_config(row: TableRow) -> RunConfig:
    """A configuration in which every device is a replica.

    Raises:
        UnusableRow: the row does not state its batch or its devices.
    """
    batch, devices = required_numbers(row, "global_batch", "n_devices")
    accumulation = read_count(row, "grad_accum")
    if not accumulation:
        stated = read_number(row, "microbatch") or batch / devices
        accumulation = max(1.0, batch / devices / stated)
    return RunConfig(
        devices=devices, replicas=devices, accumulation=accumulation,
        micro=batch / devices / accumulation,
    )  # fmt: skip


def step_terms(runs: RunColumns, given: Mapping[str, ColumnOrFloat]) -> dict[str, Column]:
    """Seconds of a step by term; their sum is the step time.

    Args:
        runs: as columns.
        given: the constants of `priors.toml`, law `resnet`.
    """
    k = {name: np.asarray(value, dtype=float) for name, value in given.items()}
    full = runs.micro / (runs.micro + k["half_images"])
    flop = _PASSES * runs.micro * runs.image_flop
    products = runs.accumulation * flop / (runs.peak * k["products"] * full)
    rate = ring_rate(
        runs.replicas, np.ones_like(runs.replicas), per_host=runs.per_host,
        devices=runs.devices, inner=runs.intra_host_rate, cards=runs.network_rate,
    )  # fmt: skip
    sent = 2.0 * ring_bytes(runs.image_parameters * _GRADIENT_BYTES, runs.replicas)
    hosts = np.maximum(runs.devices / runs.per_host, 1.0)
    return {
        "products": products,
        "replicas": np.asarray(sent / (rate * k["ring"]), dtype=float),
        "update": np.zeros_like(products) + k["fixed"],
        "stragglers": products * k["stragglers"] * np.log(hosts),
    }
