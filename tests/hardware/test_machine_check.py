"""A machine's file is refused with every fault that it has, each in one sentence."""

import re
from pathlib import Path

import pytest

from windlass.errors import InputErrors
from windlass.hardware import catalog

GOOD = """
name = "ours"
hosts = 2
devices_per_host = 8
source = "ours"
date = "2026-11-22"
[device]
kind = "cuda"
launch_seconds = "5 us"
update_rate = "2 TB/s"
traffic = { points = [[1e4, 1e10], [1e9, 2e12]] }
[[device.matmul]]
precision = "bfloat16"
peak = "300 TFLOP/s"
curve = { points = [[1e6, 1e12], [1e13, 2e14]] }
attention = { points = [[1e8, 1e12], [1e12, 1e14]] }
[[device.tiers]]
name = "device"
capacity_bytes = "80 GB"
[[device.tiers]]
name = "host"
capacity_bytes = "256 GB"
read = "50 GB/s"
write = "50 GB/s"
[[links]]
name = "nvlink"
joins = 8
latency = "6 us"
rate = "300 GB/s"
[[links]]
name = "network"
joins = 16
latency = "10 us"
rate = "25 GB/s"
shared_by = 1
"""


def faults(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    """What is wrong with the good file after some changes of its text."""
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "ours.toml").write_text(text)
    with pytest.raises(InputErrors) as refused:
        catalog.load_machine(str(tmp_path / "ours.toml"))
    return [re.sub(r"^\S*ours.toml:(\d+:)? ", "", message) for message in refused.value.messages]


def test_a_good_file_has_no_fault(tmp_path: Path):
    (tmp_path / "ours.toml").write_text(GOOD)
    assert catalog.load_machine(str(tmp_path / "ours.toml")).devices == 16


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"300 TFLOP/s"', "nan", "`device.matmul.0.peak` = nan: nan is not a rate"),
        ('"300 TFLOP/s"', "-1e12", "is not a rate such as"),
        ('"300 TFLOP/s"', "inf", "is not a rate such as"),
        ('"300 TFLOP/s"', "0", "`device.matmul.bfloat16.peak` = 0, which must be more than 0"),
        ('"300 TFLOP/s"', "1e300", "more than any machine has"),
        ('"300 TFLOP/s"', '"100 TFLOP/s"', "`device.matmul.bfloat16.curve` reaches 2e+14 FLOP/s"),
        ('peak = "300 TFLOP/s"\n', "", "`device.matmul.0.peak` is missing"),
        ("[[1e6, 1e12], [1e13, 2e14]]", "[[1e13, 2e14], [1e6, 1e12]]", "sizes must rise"),
        ("attention = { points = [[1e8, 1e12], [1e12, 1e14]] }\n", "", "attention` is missing"),
        ('"bfloat16"', '"float8"', "states no rate in float32, bfloat16 or float16"),
        ("hosts = 2", "hosts = 0", "`hosts` = 0, which must be more than 0"),
        ("hosts = 2", "hosts = 3", "joins 16 of 24 devices; raise its `joins`, or add"),
        ('capacity_bytes = "80 GB"', "capacity_bytes = 0", "tiers.device.capacity_bytes` = 0"),
        ('read = "50 GB/s"\n', "", "`device.tiers.host.read` = 0, which must be more than 0"),
        ("joins = 8", "joins = 16", "order links from the innermost to the outermost"),
        ('"10 us"', '"2 d"', "`links.network.latency` = 172800 is more than any machine has"),
        ('"network"', '"nvlink"', "`links` states `nvlink` 2 times; keep one of them"),
        ("devices_per_host", "device_per_host", "did you mean `devices_per_host`"),
    ],
)
def test_a_wrong_number_is_one_sentence_with_the_key(tmp_path: Path, old: str, new: str, told: str):
    (message,) = faults(tmp_path, (old, new))
    assert told in message


def test_all_faults_are_told_at_once(tmp_path: Path):
    told = faults(tmp_path, ("hosts = 2", "hosts = -2"), ('rate = "25 GB/s"', "rate = 0"))
    assert len(told) == 2
    assert "`hosts` = -2" in told[0]
    assert "`links.network.rate` = 0" in told[1]


def test_a_machine_of_several_devices_needs_links(tmp_path: Path):
    (message,) = faults(tmp_path, (GOOD[GOOD.index("[[links]]") :], ""))
    assert "`links` is empty, but there are 16 devices; add a `[[links]]`" in message
