"""Faults for `judge.py`: ranks on two hosts of this machine, and what goes wrong there."""

import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Process
from pathlib import Path
from typing import IO
from unittest.mock import patch

import torch

from network import run_or_skip
from windlass.runtime.distributed import local_launcher, rendezvous
from windlass.runtime.distributed.flat_weights import WeightPart
from windlass.runtime.distributed.process_groups import PendingCollective, ProcessGroups

HOSTS = ("windlassj0", "windlassj1")
CABLES = ("windlassk0", "windlassk1")
ADDRESSES = ("10.213.9.1", "10.213.9.2")
CLONE_NEWNET = 0x40000000
BURNERS = 8
SLOW_LINK = ("tbf", "rate", "250mbit", "burst", "64kb", "latency", "400ms")
SHARDS, SHARD_BYTES, BAD_SHARD = 8, 60_000, 3


class ForkedRank:
    """What a launcher needs of a process that it has started."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def wait(self) -> None:
        """Waits until it has ended."""
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.returncode = 0


@contextmanager
def forked_ranks(case: str) -> Iterator[list[int]]:
    """Lets the launcher fork its ranks; yields their process ids."""
    pids: list[int] = []

    def start(self: object, command: tuple[str, ...], store: Path, rank: int, threads: int):  # noqa: ANN202
        del threads
        words = [*command[3:], "--store", str(store), "--rank", str(rank)]
        (child_in, stdin), (stdout, child_out) = os.pipe(), os.pipe()
        with local_launcher.stderr_file(self._folder, rank).open("wb") as stderr:
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, words, case, (child_in, child_out, stderr.fileno()))
        os.setpgid(pid, pid)
        os.close(child_in)
        os.close(child_out)
        pids.append(pid)
        return ForkedRank(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))

    with patch.object(local_launcher.LocalLauncher, "_start", start):
        yield pids


def _be_rank(rank: int, words: list[str], case: str, files: tuple[int, int, int]) -> None:
    """Runs a rank in this process, and never returns."""
    from windlass.cli.main import main as windlass_main

    code = 70
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 256)
        host = rank // 2
        with Path("/run/netns", HOSTS[host]).open("rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        # A run of one host's processes listens on the loopback alone.
        vars(rendezvous)["_LOOPBACK"] = {"GLOO_SOCKET_IFNAME": CABLES[host]}
        torch.set_num_threads(1)
        if case == "sum":
            ProcessGroups.reduce_grads = sum_in_place_of_mean
        sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        windlass_main(words)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_mean = ProcessGroups.reduce_grads


def sum_in_place_of_mean(
    self: ProcessGroups, flat: torch.Tensor, part: WeightPart
) -> PendingCollective:
    """The reduction of a gradient over replicas, without the division by their number."""
    flat.mul_(self._plan.parallel.data)
    return _mean(self, flat, part)


def burn_core(pids: list[int], seed: int) -> Callable[[], None]:
    """Another job of eight processes is pinned to the core that one rank is pinned to."""
    core = sorted(os.sched_getaffinity(0))[seed % 2]
    set_affinity(pids[seed % len(pids)], {core})
    burners = [Process(target=_burn, args=(core,)) for _ in range(BURNERS)]
    for burner in burners:
        burner.start()

    def end() -> None:
        for burner in burners:
            _kill(burner)

    return end


def set_affinity(pid: int, cores: set[int]) -> None:
    """Pins all threads of a process."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def _burn(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def slow_link(pids: list[int], seed: int) -> Callable[[], None]:
    """The cable between the hosts falls to 250 Mbit/s."""
    del pids, seed
    for host, cable in zip(HOSTS, CABLES, strict=True):
        run_or_skip("tc", "-n", host, "qdisc", "replace", "dev", cable, "root", *SLOW_LINK)
    return _free_link


def _free_link() -> None:
    for host, cable in zip(HOSTS, CABLES, strict=True):
        run_or_skip("tc", "-n", host, "qdisc", "del", "dev", cable, "root")


def hog_disk(pids: list[int], seed: int) -> Callable[[], None]:
    """Other processes write to the disk, past the page cache."""
    del pids, seed
    hogs = [Process(target=_hog, args=(Path(f"build/judge-hog{index}"),)) for index in range(2)]
    for hog in hogs:
        hog.start()

    def end() -> None:
        for index, hog in enumerate(hogs):
            _kill(hog)
            Path(f"build/judge-hog{index}").unlink(missing_ok=True)

    return end


def _hog(path: Path) -> None:
    block = mmap.mmap(-1, 2**22)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    while True:
        for position in range(0, 2**28, len(block)):
            os.pwrite(file, block, position)


def _kill(process: Process) -> None:
    if process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()


def make_corpora(folder: Path) -> tuple[Path, Path]:
    """Two folders of shards of the standard library's text; one shard of the second is noise."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "\n".join(path.read_text(errors="replace") for path in sources)
    good, bad = folder / "good", folder / "bad"
    for corpus in (good, bad):
        corpus.mkdir(parents=True, exist_ok=True)
        for index in range(SHARDS):
            content = text[index * SHARD_BYTES : (index + 1) * SHARD_BYTES]
            if corpus == bad and index == BAD_SHARD:
                letters = [chr(code) for code in range(32, 127)]
                content = "".join(random.Random(0).choices(letters, k=SHARD_BYTES))
            (corpus / f"shard{index}.txt").write_text(content)
    return good, bad


def busy_seconds() -> float:
    """CPU time of all processes of this machine, less that of this one and its children."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    own = sum(os.times()[:4])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - own


@contextmanager
def network() -> Iterator[None]:
    """Two namespaces joined by a cable; they are removed at the end."""
    try:
        for host in HOSTS:
            run_or_skip("ip", "netns", "add", host)
        run_or_skip("ip", "link", "add", CABLES[0], "type", "veth", "peer", "name", CABLES[1])
        for host, address, cable in zip(HOSTS, ADDRESSES, CABLES, strict=True):
            run_or_skip("ip", "link", "set", cable, "netns", host)
            run_or_skip("ip", "-n", host, "addr", "add", f"{address}/24", "dev", cable)
            run_or_skip("ip", "-n", host, "link", "set", "lo", "up")
            run_or_skip("ip", "-n", host, "link", "set", cable, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)
