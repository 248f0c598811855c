"""Layers and chips that the tests of dataflow reports share."""

from functools import cache

from windlass.capture.analytic import analytic_traces
from windlass.capture.trace import NamedTrace
from windlass.cost.dataflow.dataflow_report import DataflowSubject
from windlass.hardware import load_machine
from windlass.models import apply_model_arguments, model_config
from windlass.schema.answers.dataflow import FlowRole
from windlass.schema.graph import Precision
from windlass.schema.machine import Machine


@cache
def traces(
    name: str, precision: Precision, dials: tuple[tuple[str, float], ...] = ()
) -> dict[str, NamedTrace]:
    """The traces of a catalogue model's kinds of layers."""
    return analytic_traces(apply_model_arguments(model_config(name), dict(dials)), precision)


def subject(
    name: str = "gpt3-13b",
    *,
    kind: str = "block",
    role: FlowRole | None = "feed-forward",
    size: tuple[int, int] = (1, 2048),
    precision: Precision = "bfloat16",
    **dials: float,
) -> DataflowSubject:
    """A kind of layer of a catalogue model, of which there is one."""
    traced = traces(name, precision, tuple(sorted(dials.items())))[kind]
    return DataflowSubject(
        model=name, kind=kind, layers=1, traced=traced, role=role, size=size, precision=precision,
        can_be_sparse=kind not in ("embedding", "head"),
    )  # fmt: skip


def chip(on_chip_bytes: int, *, ridge: float = 150.0) -> Machine:
    """A device with so much memory on the chip, whose products need `ridge` FLOP for each byte."""
    machine = load_machine("a100-80gb")
    rate = machine.device.rate("bfloat16")
    traffic = machine.device.traffic
    bandwidth = rate.peak / ridge
    flat = traffic.model_copy(update={"points": (traffic.points[0]._replace(rate=bandwidth),)})
    matmul = tuple(
        each.model_copy(
            update={
                "tiles": None,
                "curve": each.curve.model_copy(
                    update={"points": (each.curve.points[0]._replace(rate=rate.peak),)}
                ),
            }
        )
        for each in machine.device.matmul
    )
    update = {"on_chip_bytes": on_chip_bytes, "traffic": flat, "matmul": matmul}
    return machine.model_copy(update={"device": machine.device.model_copy(update=update)})
