"""Runs of image models: the model of a row, and its data-parallel configuration."""

import re
import tomllib
from functools import cache
from importlib.resources import files

from windlass.capture import ImageModel
from windlass.validation.csv_table import TableRow, read_count, read_number, required_numbers
from windlass.validation.published_run import ModelShape, RunConfig

_IPU_IMAGES = 20.0
"""Images in a micro-batch on an IPU if none is published, as in Graphcore's MLPerf submissions."""


@cache
def image_model(name: str) -> ImageModel | None:
    """The image model that a row names; None if it is not a known one."""
    text = files("windlass.validation").joinpath("models.toml").read_text(encoding="utf-8")
    for key, known in tomllib.loads(text).items():
        if re.search(known["match"], name, re.IGNORECASE):
            return ImageModel(
                name=key,
                flop=known["flop"],
                activations=known["activations"],
                parameters=int(known["parameters"]),
                convolutions=known["convolutions"],
            )
    return None


def image_shape(model: ImageModel) -> ModelShape:
    """The shape of an image model, whose sequence is one token."""
    return ModelShape(
        layers=0.0, width=1.0, heads=1.0, sequence=1.0, vocabulary=0.0,
        image_flop=model.flop, image_parameters=float(model.parameters),
    )  # fmt: skip


def image_run_config(row: TableRow) -> RunConfig:
    """A configuration in which every device is a replica.

    Raises:
        UnusableRow: the row does not state its batch or its devices.
    """
    batch, devices = required_numbers(row, "global_batch", "n_devices")
    accumulation = read_count(row, "grad_accum")
    if not accumulation:
        usual = _IPU_IMAGES if "IPU" in row.text("device") else batch / devices
        stated = read_number(row, "microbatch") or usual
        accumulation = max(1.0, batch / devices / stated)
    return RunConfig(
        devices=devices, replicas=devices, accumulation=accumulation,
        micro=batch / devices / accumulation,
    )  # fmt: skip
