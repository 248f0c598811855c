"""CPU seconds of the whole command `windlass plan` with empty caches, as a user runs it.

    python benchmarks/plan_command.py [RUNS [NAME...]]

Each run starts a process, imports, makes the graph, searches and prints. Python keeps the bytecode
of modules, as it does for users. CPU seconds vary with what else the machine does, so the load
average is kept beside them.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile

from results import append_row

REQUESTS = {
    "llama3-8b": ("--on", "dgx-h100:8"),
    "llama3-70b": ("--on", "dgx-h100:32", "train.sequence=8192", "train.batch=512"),
    "gpt3-175b-pod": ("--on", "ipu-pod256", "train.sequence=2048", "train.batch=256"),
    "qwen3-30b-a3b": ("--on", "dgx-h100:2", "train.batch=256"),
    "gpt3-175b": ("--on", "dgx-a100-80gb:512", "train.sequence=2048", "train.batch=4096"),
    "bert-large": ("--on", "ipu-pod16", "train.sequence=512", "train.batch=1536"),
}


def cpu_seconds(name: str) -> float:
    """CPU seconds of one command."""
    model = name.removesuffix("-pod")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as cache:
        subprocess.run(
            [sys.executable, "-m", "windlass", "plan", model, *REQUESTS[name]],
            env={**environment, "XDG_CACHE_HOME": cache}, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(runs: int, names: list[str]) -> None:
    """Appends minimum, median and maximum of some runs of each command."""
    for name in names or REQUESTS:
        seconds = sorted(cpu_seconds(name) for _ in range(runs))
        row = {
            "request": name,
            "runs": runs,
            "min_cpu_seconds": round(seconds[0], 2),
            "median_cpu_seconds": round(statistics.median(seconds), 2),
            "max_cpu_seconds": round(seconds[-1], 2),
            "load_average": round(os.getloadavg()[1], 1),
        }
        print(*(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
        append_row("plan_command", **row)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 3, sys.argv[2:])
