"""Deadlock check: every message is received in order, and no devices wait for each other.

Programs are simulated twice. With buffers, as on gloo, a send leaves its tensor and continues; a
receive waits for it. Under NCCL's rules a send and its receive meet (`nccl_rules`). In both, a
collective waits until every device of its group has reached it: instructions that gather shards or
reduce gradients and norm, passes with tensor-parallel collectives, and the end of the step.
"""

from collections import deque
from collections.abc import Sequence

from windlass.errors import PlanError
from windlass.program.communication_groups import Communicator, communicator_partitions
from windlass.program.instruction import Program
from windlass.program.verify.communication_trace import (
    CommunicationEvent,
    CommunicationTraces,
    communication_traces,
    describe_wait,
    never_received,
    wrong_order,
)
from windlass.program.verify.nccl_rules import simulate_nccl
from windlass.schema import Graph, Plan


def verify_communication(programs: Sequence[Program], plan: Plan, graph: Graph) -> None:
    """Simulates the communication of all devices, with buffers and under NCCL's rules.

    Raises:
        PlanError: a message is not received or arrives out of order, or devices wait for each
            other.
    """
    traces = communication_traces(programs, plan, graph)
    simulate_buffered(traces)
    partitions = communicator_partitions(plan, graph)
    simulate_nccl(traces, {item: item for partition in partitions for item in partition})


def simulate_buffered(traces: CommunicationTraces) -> None:
    """Runs the devices with buffers of any size between them.

    Raises:
        PlanError: as in `verify_communication`.
    """
    _BufferedSimulator(traces).run()


class _BufferedSimulator:
    def __init__(self, traces: CommunicationTraces) -> None:
        self._traces = traces
        self._position = dict.fromkeys(traces, 0)
        """Index of the next event of each device."""
        self._sent: dict[Communicator, deque[CommunicationEvent]] = {}
        """Messages sent and not yet received."""

    def run(self) -> None:
        has_progress = True
        while has_progress:
            has_progress = False
            for device in self._traces:
                while self._advance(device):
                    has_progress = True
        waiting = [
            describe_wait(device, events[self._position[device]])
            for device, events in self._traces.items()
            if self._position[device] < len(events)
        ]
        if waiting:
            raise PlanError("; ".join(waiting[:4]))
        for communicator, queue in self._sent.items():
            for event in queue:
                raise never_received(communicator, event)

    def _advance(self, device: int) -> bool:
        """Runs one device's next event; False if it has none or must wait."""
        events, position = self._traces[device], self._position[device]
        if position == len(events):
            return False
        event = events[position]
        if event.communicator is None:
            return self._run_collective(event)
        if event.sends:
            self._sent.setdefault(event.communicator, deque()).append(event)
        else:
            queue = self._sent.get(event.communicator)
            if not queue:
                return False
            sent = queue.popleft()
            if not event.is_same_message(sent):
                raise wrong_order(device, event, sent)
        self._position[device] = position + 1
        return True

    def _run_collective(self, event: CommunicationEvent) -> bool:
        if not all(self._is_at(member, event) for member in event.group):
            return False
        for member in event.group:
            self._position[member] += 1
        return True

    def _is_at(self, device: int, event: CommunicationEvent) -> bool:
        """Whether a device's next event is this one, for the same layer and micro-batch."""
        events, position = self._traces[device], self._position[device]
        return position < len(events) and events[position].instruction == event.instruction
