import tomllib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import windlass.hardware
from windlass.errors import MachineError
from windlass.hardware import catalog
from windlass.hardware.number_sources import stated_numbers
from windlass.schema.provenance import source_of

FOLDER = Path(windlass.hardware.__file__).parent
FAMILIES = {family.name: family for family in catalog.host_families()}
ASKED = (
    *(f"{pod}{count}" for pod in ("ipu-pod", "bow-pod") for count in (4, 16, 64, 128, 256)),
    "ipu-m2000", "cs-2", "cs-3", "sn10-8", "sn30", "dgx-v100-32gb", "dgx-a100-40gb",
    "dgx-a100-80gb", "dgx-h100", "dgx-h200", "a100-40gb", "a100-80gb", "cs-2", "gc200", "h100",
    "h200", "v100",
)  # fmt: skip


@pytest.mark.parametrize("name", catalog.machine_names())
def test_each_machine_loads_under_its_own_name_with_source_and_date(name: str):
    machine = catalog.load_machine(name)
    assert machine.name == name
    assert machine.source
    assert machine.date
    assert machine.device.memory.capacity_bytes > 0


def test_all_expected_machines_are_there():
    assert set(ASKED) <= set(catalog.machine_names())


@pytest.mark.parametrize("name", catalog.machine_names())
def test_each_number_of_a_machine_has_a_source_of_its_own(name: str):
    machine = catalog.load_machine(name)
    sources = {number.path: number.source for number in stated_numbers(machine)}
    whole = machine.model_copy(update={"sources": {}})
    without = [place for place, source in sources.items() if source == whole.source_of(place)]
    assert not without


@pytest.mark.parametrize(
    "path", [*(FOLDER / "devices").glob("*.toml"), *(FOLDER / "hosts").glob("*.toml")]
)
def test_each_source_is_of_a_number_that_is_there(path: Path):
    stated = tomllib.loads(path.read_text())
    name = stated["name"]
    most = f"{name}:{FAMILIES[name].max_hosts}" if path.parent.name == "hosts" else name
    machine = catalog.load_machine(most)
    places = [number.path for number in stated_numbers(machine)]
    idle = [
        place
        for place, source in machine.sources.items()
        if place in stated["sources"] and not any(source_of(at, {place: source}) for at in places)
    ]
    assert not idle


@pytest.mark.parametrize("name", catalog.machine_names())
def test_no_curve_passes_its_peak(name: str):
    for rate in catalog.load_machine(name).device.matmul:
        points = (*rate.curve.points, *rate.attention.points)
        assert max(point.rate for point in points) <= rate.peak
        assert sorted(point.size for point in rate.curve.points) == [
            point.size for point in rate.curve.points
        ]


@given(family=st.sampled_from(sorted(FAMILIES)), data=st.data())
def test_any_number_of_hosts_is_joined_by_links_that_reach_further_and_further(
    family: str, data: st.DataObject
):
    hosts = data.draw(st.integers(1, FAMILIES[family].max_hosts))
    machine = catalog.load_machine(f"{family}:{hosts}")
    assert machine.hosts == hosts
    assert machine.devices == hosts * FAMILIES[family].devices_per_host
    joins = [link.joins for link in machine.links]
    assert joins == sorted(set(joins))
    assert (joins or [1])[-1] == machine.devices


def test_a_product_name_is_a_number_of_hosts():
    pod, hosts = catalog.load_machine("ipu-pod256"), catalog.load_machine("ipu-m2000:64")
    assert pod == hosts.model_copy(update={"name": "ipu-pod256"})
    assert pod.devices == 256


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
        ("dgx-h100:1025", "`dgx-h100:N` has 1 to 1024 of 8 devices each"),
        ("dgx-h100:two", "two is not a number of hosts"),
        ("dgx-h100:", "nothing is not a number of hosts"),
        ("h100:8", "`dgx-h100:N` is N hosts"),
        ("ipu-pod16:4", "`ipu-m2000:N` is any number"),
    ],
)
def test_an_unknown_machine_is_refused_with_the_way_out(name: str, message: str):
    with pytest.raises(MachineError) as refused:
        catalog.load_machine(name)
    assert message in str(refused.value)


def test_a_machine_file_says_nothing_twice():
    for name in catalog.device_names():
        tree = tomllib.loads((FOLDER / "devices" / f"{name}.toml").read_text())
        assert len({rate["precision"] for rate in tree["device"]["matmul"]}) == 2


def test_a_file_of_the_user_is_a_machine_too(tmp_path: Path):
    machine = catalog.load_machine("h100").model_copy(update={"name": "ours", "hosts": 2})
    machine.save(tmp_path / "ours.toml")
    assert catalog.load_machine(str(tmp_path / "ours.toml")) == machine
