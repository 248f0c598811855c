"""Rings and messages on nested links, against what their ports carry."""

import pytest
from hypothesis import given, strategies as st

from windlass.cost.ring_bandwidth import all_to_all_cost, message_cost, ring_cost
from windlass.hardware import catalog
from windlass.schema.machine import Link

SWITCH = Link(name="switch", joins=8, latency=1e-6, rate=300e9, shared_by=1)
CARDS = Link(name="cards", joins=64, latency=1e-5, rate=25e9, shared_by=2)
HOST = (SWITCH, CARDS)


def test_devices_with_ports_of_their_own_do_not_slow_each_other():
    beside = ring_cost(HOST, 2, stride=1, active_devices=8)
    alone = ring_cost(HOST, 2, stride=1, active_devices=2)
    assert beside == alone
    assert beside.byte_seconds == pytest.approx(1 / SWITCH.rate)
    assert beside.hop_seconds == SWITCH.latency


def test_rings_that_leave_a_host_share_its_cards():
    """Eight rings of one device a host each go through four cards: two to a card."""
    way = ring_cost(HOST, 8, stride=8, active_devices=64)
    assert way.byte_seconds == pytest.approx(2 / CARDS.rate)
    assert way.hop_seconds == CARDS.latency


def test_one_ring_through_all_devices_of_a_host_has_all_its_cards():
    """Between 8 hosts 7/8 of a buffer go over 4 cards of 25 GB/s, where a ring sends 63/64."""
    way = ring_cost(HOST, 64, stride=1, active_devices=64)
    assert way.byte_seconds == pytest.approx(7 / 8 / (63 / 64) / (4 * CARDS.rate))


def test_a_ring_is_no_faster_than_the_links_within_hosts():
    cards = CARDS.model_copy(update={"rate": 1e15})
    way = ring_cost((SWITCH, cards), 64, stride=1, active_devices=64)
    assert way.byte_seconds == pytest.approx(1 / SWITCH.rate)


def test_a_bus_is_divided_among_the_rings_that_share_it():
    bus = Link(name="bus", joins=8, latency=1e-4, rate=1e9)
    assert ring_cost((bus,), 8, stride=1, active_devices=8).byte_seconds == pytest.approx(
        1 / bus.rate
    )
    assert ring_cost((bus,), 2, stride=1, active_devices=8).byte_seconds == pytest.approx(
        4 / bus.rate
    )


def test_messages_of_a_host_share_its_cards_and_a_lone_one_does_not():
    assert message_cost(HOST, 64, active_devices=8).byte_seconds == pytest.approx(2 / CARDS.rate)
    assert message_cost(HOST, 64, active_devices=1).byte_seconds == pytest.approx(1 / CARDS.rate)
    assert message_cost(HOST, 8, active_devices=4).byte_seconds == pytest.approx(1 / SWITCH.rate)


def test_an_exchange_of_tokens_within_a_host_takes_as_long_as_a_ring_of_as_many_bytes():
    """Each device sends 7/8 of its buffer through its own port, as a member of a ring does."""
    exchange = all_to_all_cost(HOST, 8, stride=1, active_devices=8)
    assert exchange == ring_cost(HOST, 8, stride=1, active_devices=8)


def test_between_hosts_every_device_sends_through_the_cards_that_its_host_shares():
    """Of 15 messages 8 leave the host, over cards that two devices share; a ring crosses once."""
    exchange = all_to_all_cost(HOST, 16, stride=1, active_devices=64)
    assert exchange.byte_seconds == pytest.approx(2 * 8 / 15 / CARDS.rate)
    assert exchange.hop_seconds == pytest.approx((7 * SWITCH.latency + 8 * CARDS.latency) / 15)


@given(
    name=st.sampled_from(["dgx-v100-32gb:64", "dgx-a100-80gb:64", "ipu-pod256", "cs-2:64"]),
    powers=st.tuples(st.integers(0, 3), st.integers(1, 5)),
    times=st.floats(1, 100),
)
def test_slower_ports_never_make_a_ring_faster(name: str, powers: tuple[int, int], times: float):
    links = catalog.load_machine(name).links
    apart, ranks = (2**power for power in powers)
    for at, link in enumerate(links):
        slower = link.model_copy(update={"rate": link.rate / times})
        changed = (*links[:at], slower, *links[at + 1 :])
        fast, slow = (
            ring_cost(each, ranks, stride=apart, active_devices=64) for each in (links, changed)
        )
        assert slow.byte_seconds >= fast.byte_seconds
        assert slow.byte_seconds <= times * fast.byte_seconds * (1 + 1e-9)


def test_a_machine_of_one_device_has_no_ring():
    with pytest.raises(KeyError, match="no link"):
        ring_cost((), 2, stride=1, active_devices=2)
