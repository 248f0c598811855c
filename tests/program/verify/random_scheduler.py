"""A second way to play programs under NCCL's rules: threads of work, taken in any order.

Hosts, computing streams and the streams of communicators are generators that yield while they
wait. A scheduler runs whichever it likes, until all have ended or a whole round changes nothing.
"""

from collections import defaultdict
from collections.abc import Generator, Hashable, Mapping
from random import Random

from windlass.program.communication_groups import Communicator
from windlass.program.verify.communication_trace import CommunicationEvent, CommunicationTraces
from windlass.program.verify.nccl_rules import NcclRules

_Thread = Generator[None]


def ends_under_random_scheduling(
    traces: CommunicationTraces,
    carriers: Mapping[Communicator, Hashable],
    rules: NcclRules,
    chance: Random,
) -> bool:
    """Whether all devices come to their end, and each message to whom it was meant for."""
    world = _World(traces, carriers, rules)
    threads = [
        thread for device in traces for thread in (world.host(device), world.compute(device))
    ]
    threads += [
        world.stream(device, carrier)
        for device in traces
        for carrier in {carriers[e.communicator] for e in traces[device] if e.communicator}
    ]
    while True:
        chance.shuffle(threads)
        before = world.changes
        for thread in list(threads):
            if next(thread, thread) is thread:
                threads.remove(thread)
                world.changes += 1
        if not threads or world.is_wrong:
            return not world.is_wrong
        if world.changes == before:
            return False


class _World:
    def __init__(
        self,
        traces: CommunicationTraces,
        carriers: Mapping[Communicator, Hashable],
        rules: NcclRules,
    ) -> None:
        self.traces, self.carriers, self.rules = traces, carriers, rules
        self.changes, self.is_wrong = 0, False
        self.issued: dict[int, int] = dict.fromkeys(traces, 0)
        self.computed: dict[int, int] = dict.fromkeys(traces, 0)
        self.started: set[tuple[int, int]] = set()
        self.ended: set[tuple[int, int]] = set()
        self.at_first_use: dict[Hashable, set[int]] = defaultdict(set)
        self.offers: dict[tuple[Hashable, int], tuple[int, CommunicationEvent]] = {}
        """What each device's stream of a carrier has begun: the event's index, and the event."""

    def change(self) -> None:
        self.changes += 1

    def host(self, device: int) -> _Thread:
        for index, event in enumerate(self.traces[device]):
            if event.communicator and not self.rules.made_before:
                ends = frozenset(event.communicator.ranks)
                pair = self.carriers[event.communicator], ends
                while not self.host_may_go_on(device, index):
                    yield
                self.at_first_use[pair].add(device)
                self.change()
                while self.at_first_use[pair] < ends:
                    yield
            while not self.host_may_go_on(device, index):
                yield
            self.issued[device] += 1
            self.change()
            yield

    def host_may_go_on(self, device: int, index: int) -> bool:
        waits = self.rules.host_waits or self.traces[device][index - 1].communicator is None
        return index == 0 or not waits or self.computed[device] >= index

    def all_started_before(self, device: int, index: int) -> bool:
        return all((device, earlier) in self.started for earlier in range(index))

    def compute(self, device: int) -> _Thread:
        for index, event in enumerate(self.traces[device]):
            while self.issued[device] <= index:
                yield
            if event.communicator is None:
                self.started.add((device, index))
                self.change()
                while not all(self.has_come_to(member, event) for member in event.group):
                    yield
            elif not event.sends:
                while (device, index) not in self.ended:
                    yield
            elif self.rules.one_queue:
                while (device, index) not in self.started:
                    yield
            self.computed[device] += 1
            self.change()
            yield

    def has_come_to(self, device: int, event: CommunicationEvent) -> bool:
        """Whether a device has started this collective: each is there once, in one order."""
        instructions = [each.instruction for each in self.traces[device]]
        return (device, instructions.index(event.instruction)) in self.started

    def stream(self, device: int, carrier: Hashable) -> _Thread:
        for index, event in enumerate(self.traces[device]):
            if not event.communicator or self.carriers[event.communicator] != carrier:
                continue
            while self.issued[device] <= index or self.computed[device] < index:
                yield
            while self.rules.one_queue and not self.all_started_before(device, index):
                yield
            self.started.add((device, index))
            self.offers[carrier, device] = index, event
            self.change()
            while (device, index) not in self.ended:
                self.meet(device, carrier)
                yield

    def meet(self, device: int, carrier: Hashable) -> None:
        index, event = self.offers[carrier, device]
        sender, receiver = event.communicator.ranks
        peer = receiver if device == sender else sender
        if (carrier, peer) not in self.offers:
            return
        other_index, other = self.offers[carrier, peer]
        if device not in other.communicator.ranks or other.sends == event.sends:
            return
        del self.offers[carrier, device], self.offers[carrier, peer]
        self.ended |= {(device, index), (peer, other_index)}
        self.is_wrong |= event.instruction[1:] != other.instruction[1:]
        self.is_wrong |= event.communicator != other.communicator
        self.change()
