"""Two hosts on a slow network: predicted and measured step time of data and pipeline parallelism.

    python benchmarks/network.py [--model gpt-tiny] [--rates 50 200 1000] [--rounds 2]

The hosts are two network namespaces of this machine, joined by a pair of virtual Ethernet devices
with a limited rate (`tc ... tbf`). Each host has one device, which is half of this machine. This
needs root. Runs are prepared and started as on a cluster: by the script of `windlass launch`, once
in each namespace. Two replicas exchange gradients, two pipeline stages activations; rates are in
Mbit/s.
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
from windlass import api
from windlass.atomic_files import cache_folder
from windlass.hardware.local_machine import load_local_machine
from windlass.schema.machine import Link, Machine

STEPS, WARM = 8, 3
HOSTS = {"windlass0": "10.213.7.1", "windlass1": "10.213.7.2"}
CABLES = ("windlassv0", "windlassv1")
PARALLELISM = {
    "replicas": ("parallel.data=2", "sharding.parameters=1", "sharding.optimizer=1"),
    "stages": ("parallel.pipeline=2",),
}
PORT = "29417"
"""Port of the rendezvous; nothing else runs in the namespaces."""


def main() -> None:
    """Reads the command line, runs both cases at each rate and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 200, 1000])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print("Mbit/s  case      predicted  measured  measured / predicted (min to max)")
    for rate in options.rates:
        with network(rate):
            seconds = {
                case: compare(options.model, case, rate, options.rounds) for case in PARALLELISM
            }
        predicted = min(seconds, key=lambda case: seconds[case][0])
        measured = min(seconds, key=lambda case: seconds[case][1])
        print(f"{rate:6}  predicted faster: {predicted}; measured faster: {measured}")


def compare(model: str, case: str, rate: int, rounds: int) -> tuple[float, float]:
    """Predicted and measured seconds of a step; prints them and appends a row."""
    with tempfile.TemporaryDirectory() as folder:
        machine = two_hosts(rate)
        machine.save(Path(folder) / "two.toml")
        planned = windlass.plan(
            model, *PARALLELISM[case], "train.batch=16", "batch.micro=2", f"train.steps={STEPS}",
            "precision=float32", "compile=false", "recompute=none", "train.evaluate_sequences=0",
            f"train.save_every={STEPS}", machine=str(Path(folder) / "two.toml"),
        )  # fmt: skip
        runs = [train(planned, Path(folder) / f"run{index}") for index in range(rounds)]
    predicted, measured = planned.prediction.step_seconds, statistics.median(runs)
    ratios = sorted(seconds / predicted for seconds in runs)
    append_row(
        "network", model=model, mbit=rate, cut=case, predicted_seconds=predicted,
        measured_seconds=measured, ratio=measured / predicted,
    )  # fmt: skip
    print(
        f"{rate:6}  {case:8}  {predicted:7.3f} s  {measured:6.3f} s  {measured / predicted:.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    return predicted, measured


def train(planned: api.Planned, folder: Path) -> float:
    """Trains on both hosts and returns the median seconds of a step."""
    script = api.launch(planned, nodes=2, per_node=1, folder=folder)
    head = next(iter(HOSTS.values()))
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, "sh", str(script)],
            env=os.environ
            | {"HEAD": head, "PORT": PORT, "NODE_RANK": str(index), "OMP_NUM_THREADS": "1",
               "RESTARTS": "0", "GLOO_SOCKET_IFNAME": cable},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for index, (host, cable) in enumerate(zip(HOSTS, CABLES, strict=True))
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(errors))
    return statistics.median(step.seconds for step in api.load(folder).steps[WARM:])


def two_hosts(rate: int) -> Machine:
    """This machine as two hosts of one device each, joined by a link of that rate."""
    machine = load_local_machine(cache_folder())
    if machine is None:
        raise SystemExit("measure this machine first: `windlass probe`")
    halves = machine.split(2)
    link = Link(name="cable", joins=2, latency=halves.links[0].latency, rate=rate * 1e6 / 8)
    return halves.model_copy(
        update={"name": f"two-{rate}", "hosts": 2, "devices_per_host": 1, "links": (link,)}
    )


@contextmanager
def network(rate: int) -> Iterator[None]:
    """Two namespaces joined by a cable of so many Mbit/s; they are removed at the end."""
    try:
        for host in HOSTS:
            _ip("netns", "add", host)
        _ip("link", "add", CABLES[0], "type", "veth", "peer", "name", CABLES[1])
        for (host, address), cable in zip(HOSTS.items(), CABLES, strict=True):
            _ip("link", "set", cable, "netns", host)
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", cable, "up")
            limit = ("root", "tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "400ms")
            run_or_skip("tc", "-n", host, "qdisc", "add", "dev", cable, *limit)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    run_or_skip("ip", *arguments)


def run_or_skip(*command: str) -> None:
    """Runs a command that makes networks; without it, or root, the benchmark says so and ends."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"skipped: `{command[0]}` is not installed") from None
    if result.returncode:
        raise SystemExit(
            f"skipped: networks cannot be created here, `{' '.join(command)}` says: "
            f"{result.stderr.strip()}; it needs root and a kernel with veth and tbf"
        )


if __name__ == "__main__":
    main()
