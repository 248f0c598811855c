"""Runs prepared for a cluster; the hosts are processes on the loopback, or network namespaces."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from cli.rank_processes import (
    CONSTANT,
    HANG_SECONDS,
    RUN,
    SHORT_TIMEOUT,
    STAGES,
    errors_of,
    leave_no_disk,
    listeners,
    numbers,
    wait_for_step,
    wait_until_gone,
    weights,
)
from command_line import Windlass, run_here
from windlass.errors import RequestError
from windlass.runtime.distributed.rendezvous import HeadAddress, host_store
from windlass.tracking.run_reader import load_run


class Link:
    """A cable between two network namespaces of this machine, each of which is a host.

    Args:
        name: of which all names begin.
    """

    def __init__(self, name: str) -> None:
        self.ends = (f"{name}a", f"{name}b")
        self.addresses = ("10.213.9.1", "10.213.9.2")

    def inside(self, host: int) -> list[str]:
        """What stands before a command that runs on a host."""
        return ["ip", "netns", "exec", self.ends[host]]

    def environment(self, host: int) -> dict[str, str]:
        """The variables that make a host meet the other one over this cable."""
        return {
            "HEAD": self.addresses[0],
            "GLOO_SOCKET_IFNAME": self.ends[host],
        }

    def lay(self) -> None:
        """Makes both hosts and the cable, or skips the test where that is not allowed."""
        one, other = self.ends
        words = [f"netns add {end}" for end in self.ends]
        words += [f"link add {one} type veth peer name {other}"]
        for end, address in zip(self.ends, self.addresses, strict=True):
            words += [f"link set {end} netns {end}", f"-n {end} addr add {address}/24 dev {end}"]
            words += [f"-n {end} link set {up} up" for up in ("lo", end)]
        if not all(map(shutil.which, ("ip", "tc"))):
            pytest.skip("networks cannot be made here: `ip` or `tc` is missing")
        for each in (*(f"ip {word}" for word in words), self._swallow(one), self._restore(one)):
            done = subprocess.run(each.split(), capture_output=True, check=False)
            if done.returncode:
                pytest.skip(f"networks cannot be made here: {done.stderr.decode()}")

    def swallow(self) -> None:
        """Lets nothing through any more: every packet is larger than the one byte allowed."""
        for end in self.ends:
            subprocess.run(self._swallow(end).split(), check=True)

    def take_up(self) -> None:
        """Takes both hosts away."""
        for end in self.ends:
            subprocess.run(["ip", "netns", "del", end], capture_output=True, check=False)

    @staticmethod
    def _swallow(end: str) -> str:
        return f"tc -n {end} qdisc add dev {end} root tbf rate 8bit burst 1 latency 1ms"

    @staticmethod
    def _restore(end: str) -> str:
        return f"tc -n {end} qdisc del dev {end} root"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


Hosts = Callable[..., list[subprocess.Popen[str]]]
"""Starts a prepared run's script once for each host."""


@pytest.fixture(scope="module")
def start_hosts(surroundings: dict[str, str]) -> Iterator[Hosts]:
    """Starts hosts; kills those that are left running, for example because a test failed."""
    started: list[subprocess.Popen[str]] = []

    def start(
        folder: Path, count: int, link: Link | None = None, **more: str
    ) -> list[subprocess.Popen[str]]:
        rendezvous = {"HEAD": "127.0.0.1", "PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        for host in range(count):
            process = subprocess.Popen(
                [*(link.inside(host) if link else ()), "sh", str(folder / "launch.sh")],
                env=surroundings | rendezvous | {"NODE_RANK": str(host)} | more
                | (link.environment(host) if link else {}),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            started.append(process)
        return started[-count:]

    yield start
    for process in started:
        process.kill()  # does nothing to a process that was waited for
        process.communicate(timeout=60)


def outcome(hosts: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each host."""
    outputs = [process.communicate(timeout=120) for process in hosts]
    return [(p.returncode, out + err) for p, (out, err) in zip(hosts, outputs, strict=True)]


def rank_process(folder: Path, rank: int) -> int:
    """The process that runs one rank of a run."""
    processes = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return next(int(each.name) for each in processes if _is_rank(each, folder, rank))


def prepare(windlass: Windlass, *words: str) -> None:
    done = windlass("launch", *words, "--folder", "run")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_hosts_train_the_same_as_two_devices_of_one_host(
    windlass: Windlass, start_hosts: Hosts, tmp_path: Path, whole: Path
) -> None:
    prepare(windlass, *STAGES, "--nodes", "2")
    assert load_run(tmp_path / "run").state == "prepared"

    for code, told in outcome(start_hosts(tmp_path / "run", 2)):
        assert code == 0, told

    run = load_run(tmp_path / "run")
    assert run.state == "finished"
    assert numbers(run) == numbers(load_run(whole))
    assert weights(tmp_path / "run") == weights(whole)
    assert [len(steps) for steps in run.steps_by_rank] == [60, 60]


def test_a_plan_of_another_number_of_devices_than_the_cluster_has_is_refused(
    windlass: Windlass,
) -> None:
    done = windlass("launch", *STAGES, "--nodes", "2", "--per-node", "4", "--folder", "run")
    assert done.returncode == 2
    assert "the plan is for 2 devices, but 2 hosts with 4 each have 8" in done.stderr


def test_a_rank_that_nobody_has_given_a_store_says_what_starts_ranks(windlass: Windlass) -> None:
    done = windlass("rank", "run")
    assert done.returncode == 2
    assert "launch.sh" in done.stderr


def test_options_that_a_scheduler_does_not_have_are_refused_all_at_once(windlass: Windlass) -> None:
    done = windlass("launch", *STAGES, "--nodes", "2", "--kubernetes", "--time", "1:00")
    assert done.returncode == 2
    for fault in ("`--time` is for `--slurm` only", "needs `--image`", "needs `--volume-claim`"):
        assert fault in done.stderr


def test_a_port_that_is_taken_is_named_in_one_sentence() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RequestError, match=f"^port {port} of `127.0.0.1` is taken by another"):
            host_store(HeadAddress("127.0.0.1", port))


def test_the_store_of_a_cluster_listens_on_its_own_address_only() -> None:
    port = free_port()
    store = host_store(HeadAddress("127.0.0.1", port))
    assert ("127.0.0.1", port) in listeners([os.getpid()])
    assert bytes(store.compare_set("key", "", "value")) == b"value"


@pytest.mark.slow
def test_a_run_on_one_host_listens_on_the_loopback_only(
    windlass: Windlass, start_hosts: Hosts, tmp_path: Path
) -> None:
    prepare(windlass, *STAGES, "train.steps=4000", "--nodes", "1", "--per-node", "2")
    (host,) = start_hosts(tmp_path / "run", 1)
    wait_for_step(tmp_path / "run", 5, seconds=120)
    processes = [host.pid, *(rank_process(tmp_path / "run", rank) for rank in range(2))]
    addresses = {address for address, _ in listeners(processes)}
    host.send_signal(signal.SIGUSR1)  # the notice that Slurm gives
    assert addresses == {"127.0.0.1"}  # gloo's pairs, and nothing else
    ((code, _),) = outcome([host])
    assert code == 130
    assert load_run(tmp_path / "run").state == "interrupted"


WITHIN = 10
"""Seconds after the hang timeout within which all hosts must have ended."""

KILLED_AFTER = 5
"""Steps."""


class CutShort(NamedTuple):
    """A run on two hosts, of which one rank has met a signal."""

    folder: Path
    outcomes: list[tuple[int, str]]
    """Exit code and output of each host."""


CutRuns = Callable[[int, signal.Signals], CutShort]


@pytest.fixture(scope="module")
def cut_short(
    surroundings: dict[str, str], start_hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> CutRuns:
    """`cut_short(0, SIGKILL)`: the run whose rank of the first host was killed."""

    @cache
    def run(host: int, number: signal.Signals) -> CutShort:
        folder = tmp_path_factory.mktemp("cut") / "run"
        words = (
            "launch",
            *CONSTANT,
            *SHORT_TIMEOUT,
            "train.steps=4000",
            "--nodes",
            "2",
            "--folder",
            "run",
        )
        assert run_here(words, surroundings, folder.parent).returncode == 0
        hosts = start_hosts(folder, 2, RESTARTS="0")
        wait_for_step(folder, KILLED_AFTER, seconds=120)
        processes = {rank: rank_process(folder, rank) for rank in range(2)}
        os.kill(processes[host], number)
        wait_until_gone(processes, HANG_SECONDS + WITHIN)
        return CutShort(folder, outcome(hosts))

    return run


@pytest.mark.parametrize(
    ("host", "number", "told"),
    [
        (0, signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param(1, signal.SIGSTOP, "is stopped (by a signal", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, "was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, "is stopped (by a signal", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_or_stopped_ends_all_hosts_with_one_error_that_names_it(
    cut_short: CutRuns, host: int, number: signal.Signals, told: str
) -> None:
    where = f"pipeline stage {host}, tensor-parallel rank 0, data-parallel rank 0"
    named = f"rank {host} ({where}) in step"
    for code, words in cut_short(host, number).outcomes:
        assert code != 0
        assert named in words
        assert told in words
        assert f"rank {1 - host} (" not in words


def test_two_hosts_take_the_steps_of_two_devices_of_one_host_until_one_is_killed(
    cut_short: CutRuns, eight_steps: Path
) -> None:
    one, two = (
        [(step.step, step.loss, step.gradient_norm) for step in load_run(folder).steps]
        for folder in (eight_steps, cut_short(0, signal.SIGKILL).folder)
    )
    assert len(two) >= KILLED_AFTER
    assert two[:KILLED_AFTER] == one[:KILLED_AFTER]


@pytest.fixture
def link() -> Iterator[Link]:
    """Two hosts that are network namespaces, and what joins them."""
    made = Link(f"w{os.getpid()}")
    try:
        made.lay()
        yield made
    finally:
        made.take_up()


@pytest.mark.slow
def test_a_link_that_drops_all_packets_ends_both_hosts_with_an_error_that_names_a_rank(
    windlass: Windlass, start_hosts: Hosts, tmp_path: Path, link: Link
) -> None:
    prepare(windlass, *STAGES, *SHORT_TIMEOUT, "train.steps=4000", "--nodes", "2")
    folder = tmp_path / "run"
    hosts = start_hosts(folder, 2, link, RESTARTS="0")
    wait_for_step(folder, 100, seconds=120)
    processes = {rank: rank_process(folder, rank) for rank in range(2)}
    link.swallow()
    wait_until_gone(processes, HANG_SECONDS + WITHIN)
    link.take_up()
    for code, words in outcome(hosts):
        assert code != 0
        where = "pipeline stage 1, tensor-parallel rank 0, data-parallel rank 0"
        assert f"rank 1 ({where}) in step" in words, words
        assert "the link" in words


@pytest.mark.slow
def test_four_ranks_on_two_hosts_restart_from_the_last_checkpoint_when_one_is_killed(
    windlass: Windlass, start_hosts: Hosts, tmp_path: Path
) -> None:
    words = (*RUN, "batch.micro=1", "parallel.pipeline=2", "parallel.data=2", "train.steps=200")
    prepare(windlass, *words, "--nodes", "2", "--per-node", "2")
    folder = tmp_path / "run"
    hosts = start_hosts(folder, 2)
    wait_for_step(folder, 20, seconds=120)
    os.kill(rank_process(folder, 3), signal.SIGKILL)
    for code, told in outcome(hosts):
        assert code == 0, told
    done = windlass("train", *words, "--folder", "here")
    assert done.returncode == 0, done.stderr
    run = load_run(folder)
    assert run.attempts >= 3  # prepared, killed, restarted
    assert numbers(run) == numbers(load_run(tmp_path / "here"))
    assert weights(folder) == weights(tmp_path / "here")


@pytest.mark.slow
def test_a_run_goes_on_with_the_hosts_that_are_left_and_takes_the_same_tokens(
    windlass: Windlass, start_hosts: Hosts, tmp_path: Path
) -> None:
    words = (*RUN, "batch.micro=1", "parallel.data=2", "train.steps=60", "--stack", "torch")
    prepare(windlass, *words, "--nodes", "2")
    folder = tmp_path / "run"
    hosts = start_hosts(folder, 2, RESTARTS="0")
    wait_for_step(folder, 20, seconds=120)
    os.kill(rank_process(folder, 1), signal.SIGKILL)
    assert [code for code, _ in outcome(hosts)] == [1, 1]

    code, told = outcome(start_hosts(folder, 1, NODES="1"))[0]
    assert code == 0, told
    assert "made anew for 1 of 2 devices" in told
    done = windlass("train", *words, "--folder", "here")
    assert done.returncode == 0, done.stderr
    run, other = load_run(folder), load_run(tmp_path / "here")
    assert run.plan is not None
    assert run.plan.parallel.devices == 1
    losses = [[step.loss for step in each.steps] for each in (run, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_hosts_that_leave_no_equal_share_of_the_batch_are_refused_with_the_numbers(
    windlass: Windlass, start_hosts: Hosts, tmp_path: Path
) -> None:
    words = (*RUN, "batch.micro=1", "parallel.data=2")
    prepare(windlass, *words, "--nodes", "2")
    code, told = outcome(start_hosts(tmp_path / "run", 1, NODES="7"))[0]
    assert code == 2
    assert "for 2 devices and there are 7" in told


@pytest.mark.slow
def test_a_cluster_that_is_asked_to_stop_saves_and_resumes_when_it_is_started_again(
    windlass: Windlass, start_hosts: Hosts, tmp_path: Path
) -> None:
    words = (*STAGES, "train.steps=400", "train.save_every=1000")
    prepare(windlass, *words, "--nodes", "1", "--per-node", "2")
    folder = tmp_path / "run"
    hosts = start_hosts(folder, 1)
    wait_for_step(folder, 20, seconds=120)
    hosts[0].send_signal(signal.SIGTERM)
    outcome(hosts)
    record = load_run(folder)
    assert record.state == "interrupted"
    newest = max((folder / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{record.steps[-1].step:08d}"

    for code, told in outcome(start_hosts(folder, 1)):
        assert code == 0, told
    done = windlass("train", *words, "--folder", "here")
    assert done.returncode == 0, done.stderr
    assert numbers(load_run(folder)) == numbers(load_run(tmp_path / "here"))
    assert weights(folder) == weights(tmp_path / "here")


@pytest.mark.slow
def test_a_slurm_job_that_is_given_notice_queues_again_and_goes_on_bit_for_bit(
    windlass: Windlass, surroundings: dict[str, str], tmp_path: Path
) -> None:
    """Stand-ins for `srun`, which hands SIGUSR1 on, and `scontrol`, which notes what it is told."""
    words = (*STAGES, "train.steps=400", "train.save_every=1000")
    prepare(windlass, *words, "--nodes", "1", "--per-node", "2", "--slurm")
    folder, programs = tmp_path / "run", tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(
        '#!/bin/sh\nfor word; do last="$word"; done\nsh "$last" &\n'
        "trap 'kill -USR1 $!' USR1\nwait $!\nCODE=$?\n"
        "[ $CODE -le 130 ] || { wait $!; CODE=$?; }\nexit $CODE\n"
    )
    (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    job = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1"}
    command = ["bash", str(folder / "slurm.sh")]
    with subprocess.Popen(command, env=surroundings | job) as started:
        wait_for_step(folder, 20, seconds=120)
        started.send_signal(signal.SIGUSR1)
        assert started.wait(timeout=120) == 130
    assert (tmp_path / "told").read_text().splitlines()[-1] == "requeue 7"
    assert load_run(folder).state == "interrupted"

    subprocess.run(command, env=surroundings | job, check=True, timeout=300)
    done = windlass("train", *words, "--folder", "here")
    assert done.returncode == 0, done.stderr
    assert numbers(load_run(folder)) == numbers(load_run(tmp_path / "here"))
    assert weights(folder) == weights(tmp_path / "here")


@pytest.mark.slow
def test_a_rank_that_fails_on_a_cluster_leaves_a_report_and_all_end(
    windlass: Windlass, start_hosts: Hosts, tmp_path: Path
) -> None:
    prepare(windlass, *STAGES, "train.steps=4000", "--nodes", "1", "--per-node", "2")
    folder = tmp_path / "run"
    hosts = start_hosts(folder, 1, RESTARTS="0")
    wait_for_step(folder, 20, seconds=120)
    leave_no_disk(rank_process(folder, 1))
    ((code, told),) = outcome(hosts)
    assert code != 0
    assert "rank 1 (pipeline stage 1, tensor-parallel rank 0, data-parallel rank 0) in step" in told
    assert "no space left to write" in told
    assert "StorageError" in (folder / "ranks" / "1.json").read_text()


def _is_rank(process: Path, folder: Path, rank: int) -> bool:
    try:
        return errors_of(process) == folder / "ranks" / f"{rank}.err"
    except OSError:
        return False
