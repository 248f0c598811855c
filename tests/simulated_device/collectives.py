# ruff: noqa: ANN401  torch hands over operations and arguments of any type
"""Collectives of gloo on simulated tensors, with the rules of NCCL.

One that is waited for at once runs in the current stream, another one in a stream of its group, and
`Work.wait` makes the current stream wait for it. Ranks run them in the order in which they were
asked for, whatever the schedule: else gloo, which blocks, would wait for ever. So would two ranks
that send to each other: a send leaves a copy of its values and goes on, which is all that a
program's values depend on. NCCL's sends wait for their receiver; a proof apart shows that they end.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._pytree import tree_leaves, tree_map

from simulated_device.simulation import Simulation
from simulated_device.streams import SimulatedStream, Token
from simulated_device.tensor import SimulatedTensor, inner_of

_SEND = "send"
"""It writes nothing; all others write their first argument."""


class SimulatedWork(Work):
    """What torch returns for a collective that is not waited for at once.

    Args:
        simulation: what runs it.
        done: the token behind it.
        kept: its tensors, which NCCL keeps until somebody has waited.
    """

    def __init__(self, simulation: Simulation, done: Token, kept: list[Tensor]) -> None:
        super().__init__()
        self._simulation, self._done, self._kept = simulation, done, kept

    def wait(self, timeout: object = None) -> bool:
        """Makes the current stream wait for it; the host goes on."""
        del timeout
        self._simulation.wait(self._done, None)
        self._kept.clear()
        return True

    def is_completed(self) -> bool:
        """Whether it has run; the host then knows."""
        return self._simulation.query(self._done)

    @property
    def has_run(self) -> bool:
        """Whether it has run, which the host does not know."""
        return self._done.is_done


class Collectives:
    """Puts collectives off.

    Args:
        simulation: the streams that they run in.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._streams: dict[str, SimulatedStream] = {}
        self._last: Token | None = None
        self._works: list[SimulatedWork] = []
        """Kept, because torch hands on no more than the C++ part of them."""
        self._sent: list[tuple[Any, Any]] = []
        """What gloo may still be sending, and its handles."""

    def finish(self) -> None:
        """Runs all that were asked for, before the host itself communicates."""
        with self._simulation.lock:
            if self._last is not None:
                self._simulation.until(self._last)

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What torch expects of a collective, which runs later."""
        name = func._schema.name.removeprefix("c10d::")
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SimulatedTensor)]
        written = () if name == _SEND else tree_leaves(args[0])
        accesses = [x.access(writes=any(x is w for w in written)) for x in leaves]
        inner_args, inner_kwargs = tree_map(inner_of, (tuple(args), kwargs))

        def run() -> None:
            if name == _SEND:
                copies = tree_map(_copy_of, inner_args)
                self._sent.append((func(*copies, **inner_kwargs), copies))
                return
            result = func(*inner_args, **inner_kwargs)
            work = result[1] if isinstance(result, tuple) else result
            Work.unbox(work).wait()

        stream = self._stream(func, args, kwargs)
        with self._simulation.use_stream(stream):
            if self._last is not None:
                stream.queue.append(self._last)
            self._simulation.submit(run, accesses, name)
            done = self._last = self._simulation.record(stream)
        self._works = [work for work in self._works if not work.has_run]
        self._works.append(SimulatedWork(self._simulation, done, [*leaves]))
        boxed = self._works[-1].boxed()
        return (args[0], boxed) if len(func._schema.returns) == 2 else boxed

    def _stream(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> SimulatedStream:
        """The stream of a collective: its group's, which waits for the current one."""
        names = [argument.name for argument in func._schema.arguments]
        values = dict(zip(names, args, strict=False)) | kwargs
        current = self._simulation.current_stream()
        if not values.get("async_op", True):
            return current
        group = ProcessGroup.unbox(values["process_group"]).group_name
        if group not in self._streams:
            self._streams[group] = self._simulation.new_stream()
        stream = self._streams[group]
        self._simulation.order(self._simulation.record(current), stream)
        return stream


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
