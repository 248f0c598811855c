import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import windlass.hardware
from windlass.errors import MachineError
from windlass.hardware import catalog
from windlass.hardware.machine_check import stated_numbers
from windlass.schema.machine import Machine
from windlass.schema.machine.provenance import source_of
from windlass.schema.machine.rates import Curve

FOLDER = Path(windlass.hardware.__file__).parent
FAMILIES = {family.name: family for family in catalog.host_families()}
ASKED = (
    *(f"{pod}{count}" for pod in ("ipu-pod", "bow-pod") for count in (4, 16, 64, 128, 256)),
    "ipu-m2000", "cs-2", "cs-3", "sn10-8", "sn30", "dgx-v100-32gb", "dgx-a100-40gb",
    "dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-tray", "gb200-nvl72",
    "mi300x-server", "rtx-4090-pc", "rtx-5090-pc", "l40s-server",
    "tpu-v5p-slice", "a100-40gb", "a100-80gb", "a100-pcie", "gc200", "h100", "h100-pcie", "h200",
    "v100", "b200", "gb200", "mi300x", "rtx-4090", "rtx-5090", "l40s", "a10g", "m2-ultra",
    "m3-max", "m4-max", "tpu-v5p",
)  # fmt: skip
UNMASKED_HALF = 2
"""A kernel that skips what a causal mask hides appears at most twice as fast as it computes."""

ROUNDED = 1.015
"""Data sheets round: an L40S has 362 TFLOP/s in 16 bits and 733 in 8."""
UPDATE_SHARE = 0.8
"""Share of a data sheet's memory rate that the fused optimizer reaches, by convention."""
LEAST_SUSTAINED = 0.75
"""Share of it that element-wise ops reach at least."""


@cache
def machines() -> dict[str, Machine]:
    """Every machine that has a name, and the largest of each family."""
    largest = {f"{name}:{family.max_count}" for name, family in FAMILIES.items()}
    return {name: catalog.load_machine(name) for name in {*catalog.machine_names(), *largest}}


def curves(machine: Machine) -> dict[str, tuple[tuple[float, float], ...]]:
    """All curves of a machine by their place."""
    numbers = stated_numbers(machine)
    return {each.path: each.value for each in numbers if isinstance(each.value, tuple)}


def test_each_machine_loads_under_its_own_name_with_source_and_date():
    for name, machine in machines().items():
        assert machine.name == name
        assert machine.source
        assert machine.date
    assert set(ASKED) <= set(catalog.machine_names())


def test_each_number_of_each_machine_has_a_source_of_its_own():
    for machine in machines().values():
        whole = machine.model_copy(update={"sources": {}})
        without = [
            number.path
            for number in stated_numbers(machine)
            if number.source == whole.source_of(number.path)
        ]
        assert not without, machine.name


def test_each_source_is_of_a_number_that_is_there():
    for path in (*(FOLDER / "devices").glob("*.toml"), *(FOLDER / "hosts").glob("*.toml")):
        stated = tomllib.loads(path.read_text())
        name = stated["name"]
        most = f"{name}:{FAMILIES[name].max_count}" if path.parent.name == "hosts" else name
        places = [number.path for number in stated_numbers(machines()[most])]
        idle = [
            place
            for place, source in machines()[most].sources.items()
            if place in stated["sources"]
            and not any(source_of(at, {place: source}) for at in places)
        ]
        assert not idle, name


def test_no_rate_that_is_reached_passes_the_peak():
    for machine in machines().values():
        half = machine.device.rate(machine.device.half_precision)
        for rate in machine.device.matmul:
            reached = [point.rate for point in (*rate.curve.points, *rate.attention.points)]
            assert max(reached) <= max(rate.peak, half.peak)
            for attention in rate.attention_rates:
                points = (*attention.forward.points, *attention.backward.points)
                assert max(point.rate for point in points) <= UNMASKED_HALF * rate.peak


def test_rates_never_fall_as_work_grows():
    for machine in machines().values():
        for place, points in curves(machine).items():
            assert all(low[1] <= high[1] for low, high in pairwise(points)), (machine.name, place)


def test_eight_bits_are_at_most_twice_as_fast_as_sixteen_and_those_faster_than_float32():
    for machine in machines().values():
        peaks = {rate.precision: rate.peak for rate in machine.device.matmul}
        half = machine.device.half_precision
        assert half != "float32"
        assert peaks["float32"] <= peaks[half]
        assert peaks.get("float8", 0.0) <= 2 * ROUNDED * peaks[half]


def test_a_newer_attention_kernel_is_never_slower():
    for name in catalog.device_names():
        for rate in machines()[name].device.matmul:
            rates = {(each.kernel, each.head_width): each for each in rate.attention_rates}
            for (kernel, width), newer in rates.items():
                older = rates.get(({"flash2": "flash1", "flash3": "flash2"}.get(kernel), width))
                if older is not None:
                    assert faster(newer.forward, older.forward), name
                    assert faster(newer.backward, older.backward), name


def faster(one: Curve, other: Curve) -> bool:
    """Whether `one` is at least as fast as `other` at each size that it states."""
    return all(point.rate >= other.at(point.size) for point in one.points)


def test_what_reaches_further_is_slower_and_takes_longer_to_answer():
    for machine in machines().values():
        for near, far in pairwise(machine.links):
            assert near.rate >= far.rate / (far.shared_by or far.joins)
            assert near.latency <= far.latency
            assert near.joins < far.joins


def test_device_memory_is_slower_than_its_data_sheet_and_faster_than_offload_tiers():
    for machine in machines().values():
        device, *offload = machine.device.tiers
        assert device.capacity_bytes > 0
        assert all(tier.read and tier.write for tier in offload)
        fastest = machine.device.traffic.points[-1].rate
        assert all(fastest > (tier.both or 0.0) for tier in offload)
        data_sheet = machine.device.update_rate / UPDATE_SHARE
        assert fastest < data_sheet
        if machine.device.kind in ("cuda", "amd", "apple", "tpu"):
            assert fastest > LEAST_SUSTAINED * data_sheet


@given(family=st.sampled_from(sorted(FAMILIES)), data=st.data())
def test_any_number_of_hosts_is_joined_by_links_that_reach_further_and_further(
    family: str, data: st.DataObject
):
    number = data.draw(st.integers(1, FAMILIES[family].max_count))
    machine = catalog.load_machine(f"{family}:{number}")
    counts_hosts = FAMILIES[family].counts == "hosts"
    assert (machine.hosts if counts_hosts else machine.devices) == number
    assert machine.devices == machine.hosts * machine.devices_per_host
    joins = [link.joins for link in machine.links]
    assert joins == sorted(set(joins))
    assert (joins or [1])[-1] == machine.devices


def test_gpu_families_reach_16384_hosts():
    families = ("dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-tray")
    for name in (*families, "mi300x-server"):
        assert FAMILIES[name].max_hosts == 16_384


def test_a_product_name_is_a_number_of_hosts():
    pod, hosts = catalog.load_machine("ipu-pod256"), catalog.load_machine("ipu-m2000:64")
    assert pod == hosts.model_copy(update={"name": "ipu-pod256"})
    assert pod.devices == 256


@pytest.mark.parametrize("pod", ["ipu-pod256", "bow-pod256"])
def test_up_to_256_pods_are_joined_by_their_gateways(pod: str):
    one, all_pods = catalog.load_machine(pod), catalog.load_machine(f"{pod}:256")
    assert (all_pods.hosts, all_pods.devices) == (16_384, 65_536)
    assert all_pods.links[:-1] == one.links
    assert (all_pods.links[-1].name, all_pods.links[-1].joins) == ("gateway-network", 65_536)


def test_a_cluster_has_up_to_192_wafers_on_one_tree():
    cluster = catalog.load_machine("cs-2:192")
    assert [(link.name, link.joins) for link in cluster.links] == [("swarmx", 192)]


def test_a_rack_of_72_is_joined_by_nvlink_and_racks_by_the_network():
    rack, two = catalog.load_machine("gb200-nvl72"), catalog.load_machine("gb200-tray:36")
    assert [(link.name, link.joins) for link in rack.links] == [("nvlink", 72)]
    assert [(link.name, link.joins) for link in two.links] == [("nvlink", 72), ("infiniband", 144)]


def test_a_workstation_has_as_many_devices_as_are_asked_for_in_one_host():
    two = catalog.load_machine("rtx-4090-pc:2")
    assert (two.hosts, two.devices_per_host, two.links[0].joins) == (1, 2, 2)


def test_a_host_may_say_what_memory_it_has_for_each_device():
    alone, of_host = catalog.load_machine("a100-80gb"), catalog.load_machine("dgx-a100-80gb")
    assert [tier.name for tier in of_host.device.tiers] == ["device", "host"]
    assert of_host.device.tiers[0] == alone.device.tiers[0]
    assert 8 * of_host.device.tiers[1].capacity_bytes == pytest.approx(2e12, rel=0.05)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100-80g", "did you mean `a100-80gb`"),
        ("dgx-h10:4", "did you mean `dgx-h100`"),
        ("dgx-h100:0", "0 is not a number of hosts"),
        ("dgx-h100:16385", "`dgx-h100:N` has 1 to 16384 of 8 devices each"),
        (
            "rtx-4090-pc:9",
            "9 is not a number of devices; `rtx-4090-pc:N` has 1 to 8",
        ),
        ("dgx-h100:two", "two is not a number of hosts"),
        ("dgx-h100:", "nothing is not a number of hosts"),
        ("h100:8", "`dgx-h100:N` is N hosts"),
        ("ipu-pod256:257", "`ipu-pod256:N` has 1 to 256 of 256 devices each"),
    ],
)
def test_an_unknown_machine_is_refused_with_the_way_out(name: str, message: str):
    with pytest.raises(MachineError) as refused:
        catalog.load_machine(name)
    assert message in str(refused.value)


def test_a_machine_file_says_nothing_twice():
    for name in catalog.device_names():
        tree = tomllib.loads((FOLDER / "devices" / f"{name}.toml").read_text())
        rates = tree["device"]["matmul"]
        assert len({rate["precision"] for rate in rates}) == len(rates)
        for rate in rates:
            kernels = [(r["kernel"], r["head_width"]) for r in rate.get("attention_rates", ())]
            assert len(set(kernels)) == len(kernels)


def test_a_file_of_the_user_is_a_machine_too(tmp_path: Path):
    machine = catalog.load_machine("dgx-h100:2").model_copy(update={"name": "ours"})
    machine.save(tmp_path / "ours.toml")
    assert catalog.load_machine(str(tmp_path / "ours.toml")) == machine
