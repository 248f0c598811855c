"""Two hosts on a slow network: is a step as long as predicted, and which cut is really faster?

    python benchmarks/network.py [--model gpt-tiny] [--rates 50 200 1000] [--rounds 2]

The hosts are two network namespaces of this machine, joined by a pair of virtual cables whose rate
is held down (`tc ... tbf`); each has one device, which is a half of this machine. That needs root.
Runs are prepared and started as on a cluster: `windlass launch`, and torch's launcher in each
namespace. Two replicas exchange gradients, two stages exchange activations; rates are in Mbit/s.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import windlass
from results import append_row
from windlass.atomic_files import cache_folder
from windlass.hardware.local_machine import load_local_machine
from windlass.schema.machine import Link, Machine

STEPS, WARM = 8, 3
HOSTS = {"windlass0": "10.213.7.1", "windlass1": "10.213.7.2"}
CABLES = ("windlassv0", "windlassv1")
CUTS = {
    "replicas": ("parallel.data=2", "sharding.parameters=1", "sharding.optimizer=1"),
    "stages": ("parallel.pipeline=2",),
}
PORT = "29417"
"""Of a namespace of our own, where nobody else has any."""


def main() -> None:
    """Reads the command line, runs each cut at each rate and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 200, 1000])
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    print("Mbit/s  cut       predicted  measured  measured / predicted (least to most)")
    for rate in asked.rates:
        with network(rate):
            found = {cut: compared(asked.model, cut, rate, asked.rounds) for cut in CUTS}
        foretold, measured = ({cut: pair[at] for cut, pair in found.items()} for at in (0, 1))
        said, faster = (min(side, key=lambda cut: side[cut]) for side in (foretold, measured))
        print(f"{rate:6}  predicted faster: {said}; measured faster: {faster}")


def compared(model: str, cut: str, rate: int, rounds: int) -> tuple[float, float]:
    """Predicted and measured seconds of a step; tells them, and appends a row."""
    with tempfile.TemporaryDirectory() as folder:
        machine = two_hosts(rate)
        machine.save(Path(folder) / "two.toml")
        planned = windlass.plan(
            model, *CUTS[cut], "train.batch=16", "batch.micro=2", f"train.steps={STEPS}",
            "precision=float32", "compile=false", "recompute=none", "train.evaluate_sequences=0",
            f"train.save_every={STEPS}", machine=str(Path(folder) / "two.toml"),
        )  # fmt: skip
        runs = [trained(planned, Path(folder) / f"run{at}") for at in range(rounds)]
    foretold, measured = planned.prediction.step_seconds, statistics.median(runs)
    ratios = sorted(each / foretold for each in runs)
    append_row(
        "network", model=model, mbit=rate, cut=cut, predicted_seconds=foretold,
        measured_seconds=measured, ratio=measured / foretold,
    )  # fmt: skip
    print(
        f"{rate:6}  {cut:8}  {foretold:7.3f} s  {measured:6.3f} s  {measured / foretold:.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    return foretold, measured


def trained(planned: windlass.api.Planned, folder: Path) -> float:
    """Median seconds of a step of a run on both hosts."""
    script = windlass.api.prepare(planned, nodes=2, per_node=1, launcher="torchrun", folder=folder)
    head = next(iter(HOSTS.values()))
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, "sh", str(script)],
            env=os.environ
            | {"HEAD": head, "PORT": PORT, "ADDR": address, "OMP_NUM_THREADS": "1",
               "RESTARTS": "0", "GLOO_SOCKET_IFNAME": cable},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for (host, address), cable in zip(HOSTS.items(), CABLES, strict=True)
    ]  # fmt: skip
    told = [process.communicate()[1] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("\n".join(told))
    return statistics.median(step.seconds for step in windlass.api.load(folder).steps[WARM:])


def two_hosts(rate: int) -> Machine:
    """This machine as two hosts of one device each, which a link of that rate joins."""
    here = load_local_machine(cache_folder())
    if here is None:
        raise SystemExit("this machine is not measured yet: `windlass probe`")
    halves = here.split(2)
    link = Link(name="cable", joins=2, latency=halves.links[0].latency, rate=rate * 1e6 / 8)
    return halves.model_copy(
        update={"name": f"two-{rate}", "hosts": 2, "devices_per_host": 1, "links": (link,)}
    )


@contextmanager
def network(rate: int) -> Iterator[None]:
    """Two namespaces joined by a cable of so many Mbit/s; gone at the end."""
    try:
        for host in HOSTS:
            _ip("netns", "add", host)
        _ip("link", "add", CABLES[0], "type", "veth", "peer", "name", CABLES[1])
        for (host, address), cable in zip(HOSTS.items(), CABLES, strict=True):
            _ip("link", "set", cable, "netns", host)
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", cable, "up")
            slow = ("root", "tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "400ms")
            _run("tc", "-n", host, "qdisc", "add", "dev", cable, *slow)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"skipped: `{words[0]}` is not installed") from None
    if done.returncode:
        raise SystemExit(
            f"skipped: networks cannot be made here, `{' '.join(words)}` says: "
            f"{done.stderr.strip()}; it takes root, and a kernel with veth and tbf"
        )


if __name__ == "__main__":
    main()
