"""Tables of machines: a summary of one, one row for each, every number with its source."""

from report.made_runs import machine
from report.rendering import render
from windlass.hardware import catalog
from windlass.hardware.machine_check import stated_numbers
from windlass.report.terminal.machine_tables import MachinesTable, machine_table, numbers_table

WIDTH = 80
"""Columns of a terminal window by default."""


def test_a_machine_is_shown_with_rates_tiers_and_source():
    text = render(machine_table(machine()))
    assert "410 GFLOP/s" in text
    assert "64.0 GiB, 1.20 GB/s read, 800 MB/s write" in text
    assert "measured here, 2026-11-20, noise 3.1 %" in text


def test_a_pod_is_shown_with_its_links_and_its_execution_model():
    text = render(machine_table(catalog.load_machine("ipu-pod256")), 120)
    assert "256 × graphcore in 64 hosts" in text
    assert "64.0 GB/s, 2.00 us, joins 64, 4 devices share each" in text
    assert "bulk-synchronous; offload transfers overlap compute on 8.7 % of the units" in text


def test_a_cluster_states_how_much_longer_the_slowest_host_takes():
    fitted = catalog.load_machine("dgx-a100-80gb:64")
    assert f"{100 * (fitted.straggler_factor(512) - 1):.1f} % longer for the slowest" in render(
        machine_table(fitted), 120
    )
    assert "stragglers" in {number.path for number in stated_numbers(fitted)}
    unknown = render(machine_table(catalog.load_machine("dgx-v100-32gb:64")), 120)
    assert "unknown; predictions assume equally fast hosts" in unknown
    assert "stragglers" not in render(machine_table(catalog.load_machine("dgx-a100-80gb")), 120)


def test_every_machine_has_a_line_that_fits_a_terminal():
    all_of_them = [(name, catalog.load_machine(name)) for name in catalog.machine_names()]
    lines = render(MachinesTable(all_of_them), WIDTH).splitlines()
    for name, known in all_of_them:
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert str(known.devices) in line
        assert "…" not in line
        assert line.rstrip().endswith(
            "overlap" if known.execution_model == "overlapping" else "serial"
        )


def test_a_narrow_terminal_shows_fewer_numbers_and_cuts_none():
    known = [(name, catalog.load_machine(name)) for name in ("dgx-h100", "ipu-pod256")]
    known += [("rtx-a5000-server:N", catalog.load_machine("rtx-a5000-server:512"))]
    for width in (48, 64, WIDTH):
        text = render(MachinesTable(known), width)
        assert "…" not in text
        assert all(name in text for name, _ in known)
        assert ("160, 64, 25" in text) == (width > 62)


def test_every_number_is_shown_with_how_it_is_known_and_by_whom():
    pod = catalog.load_machine("ipu-pod256")
    text = render(numbers_table(pod, stated_numbers(pod)), 300)
    for number in stated_numbers(pod):
        (line,) = (line for line in text.splitlines() if line.split()[:1] == [number.path])
        assert number.source.how in line
        assert number.source.source in line
