"""What Windlass does on a GPU that has never run it: five parts, and one report to send.

    scripts/gpu-first-run.sh [--dry-run] [--out REPORT.md] [--seconds 480] [--parts NAME ...]

- `system`: driver, GPUs and versions;
- `tests`: `pytest -m gpu`;
- `train`: 60 steps of gpt2-124m, step by step in turn with plain compiled loops;
- `phases`: the same model in phases, its weights and optimizer state streamed from host memory;
- `doctor`: `windlass doctor`, which measures the machine too. It takes three minutes or more, and
  comes last, so that it has what the others leave.

Each part is a process of its own with its share of the time that is left. One that fails, or is
ended at its limit, is said so in the report, with what it printed; the others run all the same.
`--dry-run` walks the same code on the CPU, with small sizes. This file imports nothing but the
standard library until a part runs, so that a broken installation is reported too.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from turns.contestants import Contestant

ROOT = Path(__file__).resolve().parents[1]
RESULT = "result: "
"""Begins the line in which a part says its figures, as JSON."""
_TAIL_LINES = 400
"""Lines of a part's output that the report keeps."""
_DRY = {"rounds": 3, "phases": 2, "rivals": ("autocast-flash-whole-plain",)}
_RIVALS = ("autocast-flash-whole-plain", "masters-flash-whole-plain", "masters-flash-step-plain")
_GPU = {"rounds": 60, "phases": 6, "rivals": _RIVALS}
_SEQUENCE_BYTES = 8 * 2**30
"""Memory of the GPU for each sequence of a batch: four loops lie beside each other in it."""
_ONE_DEVICE = "parallel.pipeline=1,parallel.tensor=1,parallel.data=1"


class Part(NamedTuple):
    """One part of the report."""

    name: str
    command: Sequence[str]
    share: float
    """Its share of the whole time; what earlier parts have left is shared out too."""


class Outcome(NamedTuple):
    """How a part ended."""

    name: str
    words: str
    """`ok`, or what went wrong."""
    seconds: float
    limit: float
    output: str


def parts(folder: Path, *, dry: bool) -> tuple[Part, ...]:
    """All parts, in the order in which they run.

    Args:
        folder: for what they write.
        dry: whether they run on the CPU, with small sizes.
    """
    python, me = sys.executable, str(Path(__file__).resolve())
    mark = "not gpu and not slow" if dry else "gpu"
    tests = ["tests/gpu"] if dry else gpu_tests()
    sizes = json.dumps(_DRY if dry else _GPU)
    doctor = str(folder / "windlass-doctor.toml")
    return (
        Part("system", (python, me, "--child", "system", sizes), 0.04),
        Part("tests", (python, "-m", "pytest", "-v", "-m", mark, *tests), 0.2),
        Part("train", (python, me, "--child", "train", sizes), 0.26),
        Part("phases", (python, me, "--child", "phases", sizes), 0.14),
        Part("doctor", (python, "-m", "windlass", "doctor", "--out", doctor), 0.36),
    )


def gpu_tests() -> list[str]:
    """The files of tests that a GPU has: collecting all others would take half a minute."""
    marked = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text()]
    return [str(path.relative_to(ROOT)) for path in {*marked, *(ROOT / "tests/gpu").glob("test_*")}]


def run_part(part: Part, limit: float) -> Outcome:
    """Runs a part, and ends it with all that it has started when its time is up."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=limit)
            words = "ok" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            words = f"ended at its limit of {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    return Outcome(part.name, words, time.monotonic() - start, limit, text)


def run_parts(asked: Sequence[Part], seconds: float) -> list[Outcome]:
    """Runs parts one after the other, in so many seconds at most."""
    outcomes: list[Outcome] = []
    start = time.monotonic()
    for index, part in enumerate(asked):
        left = seconds - (time.monotonic() - start)
        share = part.share / sum(each.share for each in asked[index:])
        limit = max(1.0, left * share)
        print(f"{part.name}: at most {limit:.0f} s", flush=True)
        outcomes.append(run_part(part, limit))
        print(f"{part.name}: {outcomes[-1].words}, {outcomes[-1].seconds:.0f} s", flush=True)
    return outcomes


def report_text(outcomes: Sequence[Outcome], folder: Path, *, dry: bool) -> str:
    """The report: a table of parts, what each found, its output, and the doctor's own report."""
    kind = " (dry run on a CPU)" if dry else ""
    lines = [
        f"# First run on a GPU{kind}", "",
        f"{datetime.now(UTC).date().isoformat()}, Windlass at commit {commit()}.", "",
        "| part | outcome | seconds | limit |", "|---|---|---|---|",
        *(f"| {o.name} | {o.words} | {o.seconds:.0f} | {o.limit:.0f} |" for o in outcomes), "",
    ]  # fmt: skip
    for each in outcomes:
        output = each.output.splitlines()
        results = [line.removeprefix(RESULT) for line in output if line.startswith(RESULT)]
        shown = [line for line in output if not line.startswith(RESULT)][-_TAIL_LINES:]
        lines += [f"## {each.name}", "", *results, *([""] if results else [])]
        lines += ["```text", *shown, "```", ""]
    doctor = folder / "windlass-doctor.toml"
    if doctor.exists():
        lines += ["## windlass-doctor.toml", "", "```toml", doctor.read_text(), "```", ""]
    return without_names("\n".join(lines))


def without_names(text: str) -> str:
    """The text without paths of this machine, and without the names of its user and host."""
    text = text.replace(str(ROOT), ".").replace(tempfile.gettempdir(), "TMP")
    text = text.replace(str(Path.home()), "~") if Path.home() != Path("/") else text
    with contextlib.suppress(Exception):
        text = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", text)
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "HOST", text) if host else text


def commit() -> str:
    """The commit of this checkout."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def accelerator() -> str:
    """Name of the accelerator that torch finds, or why there is none."""
    code = (
        "import torch; found = torch.accelerator.is_available(); "
        "print(torch.accelerator.current_accelerator() if found else '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"torch cannot be imported by {sys.executable}: {done.stderr.strip()}")
    return done.stdout.strip()


def system(_: dict[str, object]) -> None:
    """Prints versions, and what the driver says of its GPUs."""
    import torch

    print(f"python {platform.python_version()}, {platform.platform()}")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, ROCm {torch.version.hip}")
    for index in range(torch.cuda.device_count()):
        print(torch.cuda.get_device_properties(index))
        print(f"float8 {torch.cuda.get_device_capability(index) >= (8, 9)}, bfloat16 "
              f"{torch.cuda.is_bf16_supported(including_emulation=False)}")  # fmt: skip
    query = (
        "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,power.draw,"
        "power.limit,temperature.gpu,pcie.link.gen.current,pcie.link.width.current"
    )
    wanted = re.compile("^(CPU\\(s\\)|Model name|Socket|NUMA)")
    for command, lines in (
        (["nvidia-smi", f"--query-gpu={query}", "--format=csv"], None),
        (["nvidia-smi", "topo", "-m"], None),
        (["rocm-smi"], None),
        (["lscpu"], wanted),
        (["free", "-g"], None),
    ):
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            text = done.stdout.splitlines()
            print("\n".join(line for line in text if lines is None or lines.match(line)))


def train(sizes: dict[str, object]) -> None:
    """Steps of Windlass in turn with those of plain loops."""
    rivals = tuple(str(each) for each in sizes["rivals"])
    contest((f"windlass,{_ONE_DEVICE}", *rivals), sizes)


def phases(sizes: dict[str, object]) -> None:
    """Steps in phases in turn with those of the same model in memory."""
    streamed = f"windlass,{_ONE_DEVICE},phases={sizes['phases']}"
    contest((f"windlass,{_ONE_DEVICE},phases=1", streamed), sizes | {"rounds": 10})


def contest(names: Sequence[str], sizes: dict[str, object]) -> None:
    """Compares contestants of `in_memory.py`, and prints a table of them.

    A contestant that fails ends alone.
    """
    from concurrent.futures import ThreadPoolExecutor

    from in_memory import contestant

    task, rounds = task_name(), int(str(sizes["rounds"]))
    print(f"{RESULT}Task `{task}` of `benchmarks/in_memory.py`; {rounds} steps of each, in turn.")
    print(RESULT)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        # As the command line sets it, for all alike.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        running = [contestant(name, sys.executable, task, 1) for name in names]
        try:
            # All compile at once: that takes most of the time.
            with ThreadPoolExecutor(len(running)) as pool:
                ready = list(pool.map(warmed_up, running))
            running = [each for each, fine in zip(running, ready, strict=True) if fine]
            seconds: dict[str, list[float]] = {each.name: [] for each in running}
            for _ in range(rounds):
                for each in running:
                    seconds[each.name].append(each.step())
            print_table(running, seconds)
        finally:
            for each in running:
                each.end()
    if not all(ready):
        sys.exit(f"{ready.count(False)} of {len(names)} contestants failed")


def task_name() -> str:
    """What all contestants train: as large a batch as fits beside those of the others."""
    from windlass.torch_ext import accelerator_device

    device = accelerator_device()
    if not device.is_asynchronous:
        return "smoke"
    device.activate()
    most = device.total_memory() // _SEQUENCE_BYTES
    return f"gpt2-124m-gpu{next((size for size in (8, 4, 2) if size <= most), 1)}"


def warmed_up(each: Contestant) -> bool:
    """Takes two steps, which compile; False if the contestant has ended."""
    start = time.perf_counter()
    try:
        for _ in range(2):
            each.step()
        each.figures()  # its peak begins anew
    except SystemExit as error:
        print(f"{error}", flush=True)
        return False
    print(f"{each.name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    return True


def print_table(running: Sequence[Contestant], seconds: dict[str, list[float]]) -> None:
    """Prints a row for each contestant: step, MFU, memory, loss; predicted beside measured."""
    import statistics

    figures = {each.name: each.figures() for each in running}
    known = next((f for f in figures.values() if "model_flop" in f), None)
    head = ("contestant", "step", "predicted", "MFU", "peak MiB", "predicted", "first loss", "last")
    print(f"{RESULT}| {' | '.join(head)} |")
    print(f"{RESULT}|{'---|' * len(head)}")
    for each in running:
        own, times = figures[each.name], sorted(seconds[each.name])
        step = statistics.median(times)
        predicted, peak = own.get("predicted_seconds"), own.get("predicted_peak_bytes")
        mfu = known and known["model_flop"] / known["peak_flop_rate"] / step
        cells = (
            each.name.replace(f",{_ONE_DEVICE}", ""),
            f"{1e3 * step:.2f} ms ({1e3 * times[0]:.2f} to {1e3 * times[-1]:.2f})",
            f"{1e3 * predicted:.2f} ms" if predicted else "",
            f"{mfu:.1%} of the measured peak" if mfu else "",
            f"{own['peak_bytes'] / 2**20:.0f}", f"{peak / 2**20:.0f}" if peak else "",
            f"{each.losses[0]:.3f}", f"{each.losses[-1]:.3f}",
        )  # fmt: skip
        print(f"{RESULT}| {' | '.join(cells)} |")
    for each in running:
        if moved := figures[each.name].get("streamed_bytes"):
            rate = moved / statistics.median(seconds[each.name])
            print(f"{each.name}: {moved / 1e9:.2f} GB streamed a step, {rate / 1e9:.2f} GB/s")


def main() -> None:
    """Runs all parts, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry-run", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--out", type=Path, default=Path("windlass-gpu-report.md"))
    parser.add_argument("--seconds", type=float, default=480.0, help="all parts together")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, sizes = options.child
        {"system": system, "train": train, "phases": phases}[name](json.loads(sizes))
        return
    dry = options.dry_run
    if dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not accelerator():
        sys.exit("torch finds no GPU here; `--dry-run` walks the same parts on the CPU")
    with tempfile.TemporaryDirectory() as name:
        known = {each.name: each for each in parts(Path(name), dry=dry)}
        if unknown := sorted({*(options.parts or ())} - known.keys()):
            sys.exit(f"--parts: no part is called {unknown[0]!r}; they are {', '.join(known)}")
        asked = [known[each] for each in options.parts or known]
        outcomes = run_parts(asked, options.seconds)
        options.out.write_text(report_text(outcomes, Path(name), dry=dry))
    print(f"wrote {options.out}; please send it with an issue")
    if any(each.words != "ok" for each in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
