"""A machine of the user's own, from answers to a few questions."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from windlass.cost.ring_bandwidth import ring_cost
from windlass.errors import InputErrors
from windlass.hardware import catalog
from windlass.hardware.machine_check import stated_numbers
from windlass.hardware.machine_draft import machine_text, new_machine
from windlass.hardware.machine_questions import next_question
from windlass.schema.machine import Link, Machine

TODAY = "2026-11-22"
GB = 1e9
H100_CLUSTER = {
    "device": "h100", "hosts": "4", "network": "46 GB/s", "oversubscription": "4", "pod": "2",
}  # fmt: skip
OTHER = {"device": "other", "peak": "100 TFLOP/s", "memory": "32 GB", "memory_rate": "1 TB/s"}


def sources(machine: Machine) -> dict[str, str]:
    return {number.path: number.source.how for number in stated_numbers(machine)}


def test_what_is_stated_is_not_a_guess_and_what_is_not_or_ends_in_a_question_mark_is():
    answers = {"device": "rtx-4090", "devices": "4", "hosts": "2", "network": "100 Gb/s?"}
    machine = new_machine("lab", answers, TODAY)
    how = sources(machine)
    assert (machine.hosts, machine.devices_per_host) == (2, 4)
    assert how["hosts"] == how["devices_per_host"] == "published"
    assert how["links.network.rate"] == how["links.pcie.rate"] == "guess"
    assert "as `rtx-4090-pc`" in machine.source_of("links.pcie.rate").source
    assert how["device.matmul.bfloat16.peak"] == "published"


@pytest.mark.parametrize(
    "answers", [{"device": "h100"}, H100_CLUSTER, OTHER, {**OTHER, "devices": "2"}]
)
def test_each_number_of_a_new_machine_has_a_source_and_its_file_loads(
    answers: dict[str, str], tmp_path: Path
):
    machine = new_machine("ours", answers, TODAY)
    whole = machine.model_copy(update={"sources": {}})
    for number in stated_numbers(machine):
        assert number.source != whole.source_of(number.path), number.path
    (tmp_path / "ours.toml").write_text(machine_text(machine))
    assert catalog.load_machine(str(tmp_path / "ours.toml")) == machine


def test_every_device_of_the_catalogue_makes_a_machine_of_two_hosts():
    for device in catalog.device_names():
        machine = new_machine("ours", {"device": device, "hosts": "2"}, TODAY)
        assert machine.links[-1].joins == machine.devices == 2 * machine.devices_per_host


def gather_seconds(links: Sequence[Link], ranks: int, stride: int) -> float:
    """Seconds to gather 1 GB on each of `ranks` devices, `stride` apart, while all others do so."""
    cost = ring_cost(links, ranks, stride=stride, active_devices=32)
    return cost.byte_seconds * GB * (ranks - 1) / ranks


def test_an_oversubscribed_network_is_as_slow_as_by_hand():
    """Pods of 2 hosts of 8, a network of 46 GB/s a device, a quarter of it between pods."""
    links = new_machine("ours", H100_CLUSTER, TODAY).links
    assert [link.joins for link in links] == [8, 16, 32]
    pod = 16 * 46 / 4
    # All devices gather 1 GB: half of it enters each of 2 pods, over all of the pod's uplinks.
    assert gather_seconds(links, 32, 1) == pytest.approx(0.5 / pod)
    # Eight groups of 4, one for each tensor-parallel rank of a host, share these uplinks.
    assert gather_seconds(links, 4, 8) == pytest.approx(8 * 0.5 / pod)
    # Two hosts of one pod: half of it enters each, at the rate of a device's own card.
    assert gather_seconds(links, 2, 8) == pytest.approx(0.5 / 46)


def test_a_pod_of_one_host_has_no_network_of_its_own():
    links = new_machine("ours", {**H100_CLUSTER, "pod": "1"}, TODAY).links
    assert [(link.name, link.joins) for link in links] == [("nvlink", 8), ("spine", 32)]


def test_what_a_device_says_of_itself_stays():
    pod, catalogued = new_machine("ours", {"device": "gc200"}, TODAY), catalog.load_machine("gc200")
    assert pod.execution_model == "bulk-synchronous"
    assert pod.device == catalogued.device
    apple = new_machine("ours", {"device": "m2-ultra"}, TODAY)
    assert [tier.name for tier in apple.device.tiers] == ["device"]


def test_a_rack_of_72_keeps_its_link():
    machine = new_machine("ours", {"device": "gb200", "hosts": "36"}, TODAY)
    assert [link.joins for link in machine.links] == [72, 144]


def test_bits_of_a_network_card_are_bytes_that_arrive():
    answers = {"device": "h100", "hosts": "2", "network": "400 Gb/s", "cards": "4"}
    network = new_machine("ours", answers, TODAY).links[-1]
    assert (network.rate, network.shared_by) == (pytest.approx(0.92 * 50 * GB), 2)


def test_questions_are_asked_as_long_as_they_matter():
    answers = {"device": "h100"}
    asked = []
    while (question := next_question(answers)) is not None:
        asked.append(question.key)
        answers[question.key] = {"hosts": "2"}.get(question.key, question.default or "")
    assert asked == [
        "devices",
        "hosts",
        "link",
        "network",
        "cards",
        "oversubscription",
        "host_memory",
    ]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({}, "`device` is missing"),
        ({"device": "h10"}, "did you mean `h100`"),
        ({"device": "h100", "netwrk": "1 GB/s"}, "did you mean `network`"),
        ({"device": "h100", "hosts": "0"}, "'0' is not a number from 1"),
        ({"device": "h100", "hosts": "nan"}, "'nan' is not a number from 1"),
        ({"device": "h100", "memory": "-3"}, "is not a size such as"),
        ({"device": "h100", "hosts": "2", "network": "0"}, "must be more than 0"),
        ({"device": "h100", "hosts": "2", "network": "1e40"}, "more than any machine has"),
        ({"device": "h100", "oversubscription": "0.5"}, "is not a factor of at least 1"),
        ({**H100_CLUSTER, "pod": "4"}, "`pod` = 4 holds all 4 hosts; lower it"),
        ({"device": "h100", "network": "50 GB/s"}, "`network` says nothing of 1 host of 8 devices"),
        ({"device": "h100", "peak": "1 PFLOP/s"}, "`peak` is stated by `h100`; leave it out"),
        ({"device": "other", "memory": "1 GB"}, "needs `peak`, `memory_rate` too"),
    ],
)
def test_nonsense_is_refused_with_one_sentence(answers: dict[str, str], told: str):
    with pytest.raises(InputErrors) as refused:
        new_machine("ours", answers, TODAY)
    (message,) = refused.value.messages
    assert told in message


def test_all_faults_of_the_answers_are_told_at_once():
    with pytest.raises(InputErrors) as refused:
        new_machine("o/urs", {"device": "h10", "hosts": "x", "link": "fast"}, TODAY)
    assert len(refused.value.messages) == 4
