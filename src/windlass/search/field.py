"""Field: the space of plans over several devices, as tables of indices; nothing is built.

Plans of one shape (order, stages, chunks, micro-batches) stand together, since the closed form
prices them together. What a plan is made of is read back from its place when it has won.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

from windlass.cost.closed import Rows, Run, Tables
from windlass.cost.closed_layers import Setting, Sharing
from windlass.cost.closed_pipeline import Shape
from windlass.program.legal import arrangement_faults, slice_faults
from windlass.search.space import captured, divisors, precisions, sequence_of
from windlass.search.stages import stages_of
from windlass.spec.graph import Graph, Precision
from windlass.spec.machine import Machine
from windlass.spec.plan import Batch, Cut, Order, Plan, Sharding, Stage
from windlass.spec.request import Request

_ORDERS: tuple[Order, ...] = ("1f1b", "gpipe", "zero-bubble", "interleaved")
_CHUNKS = (2, 3, 4, 6, 8, 12)
"""Numbers of chunks that are tried where the request leaves them open."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Plans of one shape on one machine."""

    shape: Shape
    ends: tuple[int, ...]
    """First layer of each chunk, and the chain's length."""
    rows: Rows


@dataclass(frozen=True)
class Field:
    """All plans that a request leaves open.

    Args:
        request: pins whatever it names; the rest is open.
        graph: captured from the request's model, in the slices that are open.
        machine: what the plans are for.
    """

    request: Request
    graph: Graph
    machine: Machine

    @cached_property
    def sequence(self) -> int:
        """Tokens of one sequence."""
        return sequence_of(self.request, self.graph)

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Numbers of slices that layers and tokens can be cut in."""
        pin = self.request.cut.tensor
        able = (1, *sorted(self.graph.slices)) if pin is None else (pin,)
        return tuple(
            degree
            for degree in able
            if degree <= self.machine.devices
            and not any(slice_faults(degree, self.sequence, self.graph))
        )

    @cached_property
    def pipelines(self) -> tuple[int, ...]:
        """Numbers of stages: those that part the devices or the blocks evenly."""
        pin = self.request.cut.pipeline
        if pin is not None:
            return (pin,)
        most = min(self.machine.devices, self.graph.layers)
        blocks = max(span.count for span in self.graph.chain)
        return tuple(
            count
            for count in range(1, most + 1)
            if self.machine.devices % count == 0 or blocks % count == 0
        )

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Numbers of replicas, which part the batch evenly."""
        pin = self.request.cut.replicas
        batch = self.request.train.batch
        return tuple(
            count
            for count in (divisors(batch) if pin is None else (pin,))
            if count <= self.machine.devices and batch % count == 0
        )

    def cells(self) -> Iterator[Cell]:
        """All plans, shape by shape."""
        for shape in self.shapes():
            cell = self.cell(shape)
            if cell is not None:
                yield cell

    def shapes(self) -> Iterator[Shape]:
        """All shapes that are legal."""
        for pipeline, (order, chunks) in product(self.pipelines, self._orders()):
            if chunks * pipeline > self.graph.layers or (pipeline == 1 and order != "1f1b"):
                continue
            for micros in self._micros():
                shape = Shape(order, pipeline, chunks, micros)
                if not any(arrangement_faults(self._plan(shape))):
                    yield shape

    def cell(
        self,
        shape: Shape,
        *,
        tensors: Sequence[int] | None = None,
        replicas: Sequence[int] | None = None,
        precisions: Sequence[Precision] | None = None,
    ) -> Cell | None:
        """The plans of one shape; None if there are none.

        Args:
            shape: of all plans.
            tensors: takes only these numbers of slices.
            replicas: takes only these numbers of replicas.
            precisions: takes only these.
        """
        tables = Tables(shape)
        filled = False
        for tensor, count in product(
            self.tensors if tensors is None else tensors,
            self.replicas if replicas is None else replicas,
        ):
            micro = self.micro_of(shape, count)
            if micro is None or shape.pipeline * tensor * count > self.machine.devices:
                continue
            for precision in self.precisions if precisions is None else precisions:
                sharings = self.sharings(tensor, precision, shape.micros > 1, count)
                for run in self._runs(shape, tensor, precision, micro, count):
                    tables.add(run, sharings)
                    filled = True
        if not filled:
            return None
        return Cell(shape, self.ends(shape.chunks), tables.rows())

    @cached_property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions that the machine has and that the graph was captured in."""
        pin = self.request.precision
        return precisions(self.machine) if pin is None else (pin,)

    def micro_of(self, shape: Shape, replicas: int) -> int | None:
        """Sequences of a micro-batch; None if the batch does not come out even, or is pinned."""
        micro, rest = divmod(self.request.train.batch, replicas * shape.micros)
        pin = self.request.batch.micro
        return None if rest or pin not in (None, micro) else micro

    def sharings(
        self, tensor: int, precision: Precision, sums: bool, replicas: int
    ) -> tuple[Sharing, ...]:
        """The ways in which replicas may share weights and state."""
        pins = self.request.sharding
        return _sharings(tensor, precision, sums, replicas, pins.weights, pins.optimizer)

    def ends(self, chunks: int) -> tuple[int, ...]:
        """First layer of each chunk of the chain, and the chain's length."""
        bounds = stages_of(self.graph, chunks, self.sequence)
        return (*(first for first, _ in bounds), self.graph.layers)

    def plan(self, cell: Cell, index: int) -> Plan:
        """The plan at one place of a cell."""
        rows = cell.rows
        run, sharing = rows.runs[rows.run[index]], rows.sharings[rows.sharing[index]]
        setting, shape = run.setting, cell.shape
        return self._plan(shape).model_copy(
            update={
                "precision": setting.precision,
                "compile": setting.compiled,
                "cut": Cut(
                    pipeline=shape.pipeline, tensor=setting.tensor, replicas=setting.replicas
                ),
                "sharding": Sharding(weights=sharing.weights, optimizer=sharing.optimizer),
                "batch": Batch(
                    sequence=self.sequence, micro=setting.micro, accumulation=shape.micros
                ),
                "stages": tuple(
                    Stage(phases=((first, last),), recompute="layer" if run.again else "none")
                    for first, last in pairwise(cell.ends)
                ),
            }
        )

    @cached_property
    def base(self) -> Plan:
        """A plan with all that the request pins for all plans alike."""
        return Plan(
            graph=self.graph.label,
            machine=self.machine.label,
            moments=self.request.moments,
            clip=self.request.train.clip is not None,
            batch=Batch(sequence=self.sequence, micro=1),
            stages=(Stage(phases=((0, self.graph.layers),)),),
        )

    def _plan(self, shape: Shape) -> Plan:
        """A plan of a shape, for the rules that shapes are under."""
        ends = self.ends(shape.chunks)
        return self.base.model_copy(
            update={
                "order": shape.order,
                "interleave": shape.interleave,
                "cut": Cut.model_construct(pipeline=shape.pipeline, tensor=1, replicas=1),
                "batch": Batch.model_construct(
                    sequence=self.sequence, micro=1, accumulation=shape.micros
                ),
                "stages": tuple(
                    Stage.model_construct(phases=(pair,), recompute="none")
                    for pair in pairwise(ends)
                ),
            }
        )

    @cached_property
    def _compiles(self) -> dict[Order, bool]:
        """Which orders compiled layers can run in."""
        compiled = self.base.model_copy(update={"compile": True})
        return {
            order: not any(arrangement_faults(compiled.model_copy(update={"order": order})))
            for order in ("1f1b", "gpipe", "zero-bubble")
        } | {"interleaved": True}

    def _orders(self) -> Iterator[tuple[Order, int]]:
        order, chunks = self.request.order, self.request.interleave
        for each in _ORDERS if order is None else (order,):
            if each != "interleaved":
                if chunks in (None, 1):
                    yield each, 1
            elif chunks is None:
                yield from ((each, count) for count in _CHUNKS)
            elif chunks > 1:
                yield each, chunks

    def _micros(self) -> tuple[int, ...]:
        """Numbers of micro-batches of a step that some number of replicas allows."""
        pin, batch = self.request.batch.accumulation, self.request.train.batch
        found = {each for count in self.replicas for each in divisors(batch // count)}
        return tuple(sorted(found if pin is None else found & {pin}))

    def _runs(
        self, shape: Shape, tensor: int, precision: Precision, micro: int, replicas: int
    ) -> Iterator[Run]:
        modes = (False, True) if self.request.compile is None else (self.request.compile,)
        pin = self.request.recompute
        recomputes = ("none", "layer") if pin is None else (pin,)
        for compiled, recompute in product(modes, recomputes):
            if (compiled and not self._compiles[shape.order]) or not captured(
                self.graph, precision, compiled=compiled
            ):
                continue
            setting = Setting(
                tensor, precision, compiled, micro, shape.micros > 1, shape.pipeline > 1, replicas
            )
            yield Run(setting, recompute == "layer")


@lru_cache(maxsize=65536)
def _sharings(
    tensor: int,
    precision: Precision,
    sums: bool,
    replicas: int,
    weights: int | None,
    optimizer: int | None,
) -> tuple[Sharing, ...]:
    return tuple(
        Sharing(tensor, precision, sums, replicas, one, other)
        for other in divisors(replicas)
        for one in divisors(other)
        if weights in (None, one) and optimizer in (None, other)
    )
