"""Simulates programs under the rules of NCCL, where no message has a buffer.

Each device has a host, a stream that computes, and one stream for each communicator of messages.

- The host issues instructions in order, and waits for the device after each one. It need not: but
  a copy from pageable memory, a new allocation and a number that is read all make it wait.
- A communicator that was not made before the step is made by its first message, which holds up the
  hosts of both ends until both have come to it.
- A message starts when the computing stream has come to it and the communicator's stream has ended
  the message before. It ends when its other end has started too. A send holds nobody up; the
  computing stream waits for what it receives.
- A collective runs in the computing stream, as torch runs it since 2.8.

These rules are stricter than a real device, so a program that ends under them ends: running ahead,
streams for collectives and other relaxations only remove reasons to wait, and what a device does
next never depends on who is faster.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from windlass.errors import PlanError
from windlass.program.communication_groups import Communicator
from windlass.program.verify.communication_trace import (
    CommunicationEvent,
    CommunicationTraces,
    describe_wait,
    never_received,
    peer_of,
    wrong_order,
)


class NcclRules(NamedTuple):
    """Rules that depend on the device and on how communicators are made."""

    made_before: bool = True
    """Whether communicators are made and used before the step."""
    host_waits: bool = True
    """Whether the host waits for the device after each instruction; otherwise it does so only
    where all ranks reduce a number."""
    one_queue: bool = False
    """Whether a device starts everything in the order in which it was issued, as one with a single
    hardware queue for all its streams does (`CUDA_DEVICE_MAX_CONNECTIONS=1`), or with
    `NCCL_LAUNCH_ORDER_IMPLICIT=1`."""


def simulate_nccl(
    traces: CommunicationTraces,
    communicators: Mapping[Communicator, Hashable],
    rules: NcclRules = NcclRules(),  # noqa: B008  a frozen value
) -> None:
    """Runs the devices under NCCL's rules.

    Args:
        communicators: what carries the messages of each channel over a boundary; channels with
            equal values share a communicator.

    Raises:
        PlanError: a message is not received, arrives out of order or has no communicator, or
            devices wait for each other.
    """
    _NcclSimulator(traces, communicators, rules).run()


class _NcclSimulator:
    def __init__(
        self,
        traces: CommunicationTraces,
        communicators: Mapping[Communicator, Hashable],
        rules: NcclRules,
    ) -> None:
        self._traces, self._communicators, self._rules = traces, communicators, rules
        self._issued = dict.fromkeys(traces, 0)
        """Number of events that each host has issued."""
        self._reached = dict.fromkeys(traces, 0)
        """Number of events that each computing stream has passed."""
        self._started = dict.fromkeys(traces, 0)
        """Number of events, counted from the first, that have all started."""
        self._streams: dict[int, dict[Hashable, deque[int]]] = {
            device: defaultdict(deque) for device in traces
        }
        """Messages issued and not yet ended, by device and communicator."""
        self._running: dict[int, set[int]] = {device: set() for device in traces}
        """Events that have started, and are not the first to have."""
        self._received: dict[int, set[int]] = {device: set() for device in traces}
        self._first_users: dict[tuple[Hashable, frozenset[int]], set[int]] = defaultdict(set)
        """Devices that have come to the first use of a communicator of two."""
        self._awake = deque(traces)
        """Devices that may be able to go on."""

    def run(self) -> None:
        while self._awake:
            device = self._awake.popleft()
            while self._issue(device) or self._start(device) or self._pass(device):
                pass
        waiting = [
            describe_wait(device, events[self._reached[device]])
            for device, events in self._traces.items()
            if self._reached[device] < len(events)
        ]
        if waiting:
            raise PlanError(f"under NCCL's rules {'; '.join(waiting[:4])}")
        for device, streams in self._streams.items():
            for positions in streams.values():
                for position in positions:
                    event = self._traces[device][position]
                    if event.communicator is not None:
                        raise never_received(event.communicator, event)

    # The host.

    def _issue(self, device: int) -> bool:
        """Lets a host issue its next event; False if it has none or must wait."""
        position = self._issued[device]
        if position == len(self._traces[device]) or self._host_waits(device, position):
            return False
        event = self._traces[device][position]
        if event.communicator is not None:
            carrier = self._carrier(event.communicator)
            if not self._rules.made_before and not self._is_made(
                device, event.communicator, carrier
            ):
                return False
            self._streams[device][carrier].append(position)
        self._issued[device] = position + 1
        return True

    def _host_waits(self, device: int, position: int) -> bool:
        """Whether a host waits for its device before it issues an event."""
        if position == 0 or self._reached[device] == position:
            return False
        return self._rules.host_waits or self._traces[device][position - 1].communicator is None

    def _carrier(self, communicator: Communicator) -> Hashable:
        if communicator not in self._communicators:
            sender, receiver = communicator.ranks
            raise PlanError(
                f"device {sender} has no communicator for `{communicator.use}` to device {receiver}"
            )
        return self._communicators[communicator]

    def _is_made(self, device: int, communicator: Communicator, carrier: Hashable) -> bool:
        ends = frozenset(communicator.ranks)
        users = self._first_users[carrier, ends]
        if device not in users:
            users.add(device)
            self._awake.extend(ends - {device})
        return len(users) == len(ends)

    # The device.

    def _start(self, device: int) -> bool:
        """Starts the messages that can start, and ends those whose other end has started."""
        has_started = False
        for carrier, positions in self._streams[device].items():
            if positions and self._can_start(device, positions[0]):
                self._running[device].add(positions[0])
                self._meet(device, carrier)
                has_started = True
        self._count_started(device)
        return has_started

    def _can_start(self, device: int, position: int) -> bool:
        if self._has_started(device, position) or self._reached[device] < position:
            return False
        return not self._rules.one_queue or self._started[device] == position

    def _count_started(self, device: int) -> None:
        running = self._running[device]
        while self._started[device] in running:
            running.remove(self._started[device])
            self._started[device] += 1

    def _has_started(self, device: int, position: int) -> bool:
        return position < self._started[device] or position in self._running[device]

    def _meet(self, device: int, carrier: Hashable) -> None:
        """Ends the first messages of a communicator's stream if both ends have started."""
        event = self._traces[device][self._streams[device][carrier][0]]
        if event.communicator is None:
            return
        peer = peer_of(device, event.communicator)
        if peer not in self._traces or not self._streams[peer][carrier]:
            return
        position = self._streams[peer][carrier][0]
        other = self._traces[peer][position]
        if other.communicator is None or not self._has_started(peer, position):
            return
        if peer_of(peer, other.communicator) != device or event.sends == other.sends:
            return  # they wait for another message, or both send or both receive
        if other.communicator != event.communicator or not event.is_same_message(other):
            receiver, received = (peer, other) if event.sends else (device, event)
            raise wrong_order(receiver, received, event if event.sends else other)
        for end, ended in ((device, event), (peer, other)):
            index = self._streams[end][carrier].popleft()
            if not ended.sends:
                self._received[end].add(index)
        self._awake.append(peer)

    def _pass(self, device: int) -> bool:
        """Lets the computing stream pass its next event; False if it must wait."""
        position = self._reached[device]
        if position == self._issued[device]:
            return False
        event = self._traces[device][position]
        if event.communicator is None:
            return self._pass_collective(device, event)
        if event.sends:
            if self._rules.one_queue and not self._has_started(device, position):
                return False
        elif position in self._received[device]:
            self._received[device].remove(position)
        else:
            return False
        self._reached[device] = position + 1
        return True

    def _pass_collective(self, device: int, event: CommunicationEvent) -> bool:
        self._running[device].add(self._reached[device])
        self._count_started(device)
        if not all(self._is_at(member, event) for member in event.group):
            return False
        for member in event.group:
            self._reached[member] += 1
        self._awake.extend(event.group)
        return True

    def _is_at(self, device: int, event: CommunicationEvent) -> bool:
        """Whether a computing stream is at this event, for the same layer and micro-batch."""
        position = self._reached[device]
        if position == self._issued[device]:
            return False
        return self._traces[device][position].instruction == event.instruction
