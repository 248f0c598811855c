"""A graph of equal blocks, and a machine on which a step can be timed by hand."""

from factories import tiny_graph, tiny_machine
from windlass.schema.graph import Graph, LayerRun
from windlass.schema.machine import Machine
from windlass.schema.machine.rates import Curve, Point


def equal_blocks(count: int) -> tuple[Graph, Machine]:
    """So many equal layers, and a machine on which only products take time: three equal parts.

    A forward pass is one product; a backward pass is one for the input and one for the weights.
    """
    tiny = tiny_graph()
    chain = (LayerRun(kind="block", count=count),)
    graph = tiny.model_copy(update={"layer_runs": chain, "kinds": {"block": tiny.kinds["block"]}})
    machine = tiny_machine(devices=8)
    at_once, one_rate = (Curve(points=(Point(1.0, rate),)) for rate in (1e30, 1e9))
    matmul = tuple(rate.model_copy(update={"curve": one_rate}) for rate in machine.device.matmul)
    device = machine.device.model_copy(
        update={"matmul": matmul, "traffic": at_once, "launch_seconds": 0.0, "update_rate": 1e30}
    )
    link = machine.links[0].model_copy(update={"latency": 0.0, "rate": 1e30})
    return graph, machine.model_copy(update={"device": device, "links": (link,)})
