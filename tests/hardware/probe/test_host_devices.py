import pytest
import torch

from windlass.errors import MachineError
from windlass.hardware.probe.device_rank import RingTime, ring_sizes
from windlass.hardware.probe.host_devices import measure_host_devices, ring_links
from windlass.schema import Link


def rings(links: tuple[Link, ...], count: int) -> list[RingTime]:
    """The times of exchanges in rings of all sizes, each over the first link that joins it."""
    times = []
    for ranks in ring_sizes(count):
        link = next(link for link in links if link.joins >= ranks)
        for nbytes in (4, 2**20, 2**24, 2**28):
            for hops, share in (
                (2 * (ranks - 1), 2 * (ranks - 1) / ranks),
                (ranks - 1, (ranks - 1) / ranks),
                (1, 1.0),
            ):
                sent = share * nbytes
                seconds = hops * link.latency + sent / link.rate
                times.append(RingTime(ranks=ranks, hops=hops, sent_bytes=sent, seconds=seconds))
    return times


def link(joins: int, rate: float, latency: float = 6e-6) -> Link:
    return Link(name=f"ring-{joins}", joins=joins, latency=latency, rate=rate, shared_by=1)


def numbers(links: tuple[Link, ...]) -> list[float]:
    return [number for each in links for number in (each.joins, each.latency, each.rate)]


def test_rings_of_two_four_eight_and_all_devices_are_measured():
    assert ring_sizes(1) == ()
    assert ring_sizes(2) == (2,)
    assert ring_sizes(6) == (2, 4, 6)
    assert ring_sizes(8) == (2, 4, 8)


@pytest.mark.parametrize(
    "made",
    [
        (link(8, 3.65e11),),
        (link(2, 5e10), link(8, 1.2e10, latency=2e-5)),
        (link(2, 9e10), link(4, 4e10), link(8, 1e10)),
    ],
    ids=["one switch", "bridged pairs", "three levels"],
)
def test_the_links_of_a_host_are_found_again_from_the_times_of_its_rings(made: tuple[Link, ...]):
    assert numbers(ring_links(rings(made, 8), 8)) == pytest.approx(numbers(made))


def test_the_slowest_of_several_rings_at_once_counts():
    slow = [
        ring.model_copy(update={"seconds": 2 * ring.seconds}) for ring in rings((link(4, 1e10),), 4)
    ]
    found = ring_links([*rings((link(4, 1e10),), 4), *slow], 4)
    assert numbers(found) == pytest.approx(numbers((link(4, 5e9, latency=1.2e-5),)))


@pytest.mark.slow
def test_two_devices_are_measured_at_once_with_what_joins_them():
    found = measure_host_devices("cpu", 2)
    assert found.slowest in (0, 1)
    assert found.spread >= 0
    assert 0 < found.settled_share <= 1
    assert found.free_bytes > 0
    (joined,) = found.links
    assert joined.joins == 2
    assert 1e-7 <= joined.latency < 1
    assert joined.rate > 1e6


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU could be measured")
def test_a_device_that_cannot_be_measured_is_named_with_the_reason():
    with pytest.raises(MachineError, match=r"device cuda:0 of 1 cannot be measured: .*\w"):
        measure_host_devices("cuda", 1)
