"""Whether a run that is killed or stopped at a random moment loses anything.

    python benchmarks/kills.py [--kills 300] [--seed 0] [--kind NAME ...]

Runs of all kinds are begun, and killed or asked to stop at random moments: while they start,
between steps, within saves and evaluations. The same command starts them again, `resume` once
there is a run. After some kills a run is left to its end, and compared with an undisturbed one:
every loss, gradient norm and held-out loss of its record, and every byte of its last checkpoint.
Asked to stop, it must end with exit code 130 and have its last step in a checkpoint. No output
may hold a trace. The command lines are forked from a process that has imported torch; ranks are
started as always.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from results import append_row

_TINY = (
    "gpt-tiny", "model.layers=2", "model.width=32", "model.heads=2", "model.vocabulary=257",
    "data.tokenizer=byte", "train.sequence=32", "train.batch=4", "train.evaluate_sequences=4",
    "data.limit_bytes=300000", "compile=false", "batch.micro=2", "model.dropout=0.1",
)  # fmt: skip
_STEPS = ("train.steps=120", "train.save_every=7", "train.evaluate_every=20")
_BFLOAT16, _FLOAT32 = "precision=bfloat16", "precision=float32"
_ANY_WIDTH = tuple(word for word in _TINY if "width" not in word)
_SPARSE = ("model.width=64", "sparsity.level=0.5", "sparsity.block=16")

KINDS: dict[str, tuple[str, ...]] = {
    "one device": (*_TINY, _FLOAT32),
    "bfloat16": (*_TINY, _BFLOAT16),
    "float16": (*_TINY, "precision=float16"),
    "int8 moments": (*_TINY, _FLOAT32, "moments=int8"),
    "muon": (*_TINY, _FLOAT32, "train.optimizer=muon"),
    "schedule-free": (*_TINY, _FLOAT32, "train.optimizer=schedule-free"),
    "averages": (*_TINY, _FLOAT32, "train.ema=0.9"),
    "full recompute": (*_TINY, _FLOAT32, "recompute=full"),
    "phases": (*_TINY, _BFLOAT16, "phases=2"),
    "adapters": (*_TINY, _FLOAT32, "lora.rank=4"),
    "experts": (
        *("moe-tiny" if word == "gpt-tiny" else word for word in _TINY if "dropout" not in word),
        _FLOAT32,
    ),
    "static masks": (*_ANY_WIDTH, _FLOAT32, *_SPARSE),
    "rigl": (*_ANY_WIDTH, _FLOAT32, *_SPARSE, "sparsity.schedule=rigl", "sparsity.every=10"),
    "sparse, then dense": (*_ANY_WIDTH, _FLOAT32, *_SPARSE, "sparsity.schedule=then-dense"),
    "compiled": (*(word for word in _TINY if word != "compile=false"), _FLOAT32, "compile=true"),
    "replicas": (*_TINY, _FLOAT32, "parallel.data=2"),
    "stages": (*_TINY, _FLOAT32, "parallel.pipeline=2"),
    "tensor parallel": (*_TINY, _FLOAT32, "parallel.tensor=2"),
    "fully sharded": (
        *_TINY, _FLOAT32, "parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2",
    ),
    "replicas in phases": (*_TINY, _BFLOAT16, "parallel.data=2", "phases=2"),
    "torch, sharded": (
        *_TINY, _FLOAT32, "stack=torch", "parallel.data=2", "sharding.parameters=2",
        "sharding.optimizer=2",
    ),
    "torch, stages": (*_TINY, _FLOAT32, "stack=torch", "parallel.pipeline=2"),
    "torch, tensor parallel": (*_TINY, _BFLOAT16, "stack=torch", "parallel.tensor=2"),
}  # fmt: skip
_KILLS_OF_ONE_RUN = 5
_LONGEST_SECONDS = 300.0
_IMPORTED = ("windlass.cli.commands.train", "windlass.training.run", "windlass.runtime.train")
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@dataclass(slots=True)
class Tally:
    """What the kills of one kind have shown."""

    kills: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    faults: list[str] = field(default_factory=list)


def main() -> None:
    """Kills runs of all kinds, prints a line for each, and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", nargs="*", choices=sorted(KINDS), default=[*KINDS])
    options = parser.parse_args()
    for module in (*_IMPORTED, "torch.fx.experimental.symbolic_shapes"):
        import_module(module)
    draw = random.Random(options.seed)
    for number, kind in enumerate(options.kind):
        # Rounded so that all kinds together have as many as are asked for.
        first, last = (options.kills * i // len(options.kind) for i in (number, number + 1))
        with tempfile.TemporaryDirectory() as place:
            tally = kill_kind((*KINDS[kind], *_STEPS), last - first, draw, Path(place))
        sys.stdout.write(f"{kind}: {tally.kills}, {tally.runs} runs whole, {tally.faults}\n")
        sys.stdout.flush()
        append_row(
            "kills", seed=options.seed, kind=kind, kills=sum(tally.kills.values()),
            by_signal=json.dumps(tally.kills), runs=tally.runs, faults=len(tally.faults),
        )  # fmt: skip


def kill_kind(words: tuple[str, ...], kills: int, draw: random.Random, place: Path) -> Tally:
    """Kills runs of one kind, and compares each with an undisturbed one."""
    tally = Tally()
    begun = time.monotonic()
    code, text = ended(started(("train", *words, "--folder", "whole"), place), place)
    seconds = time.monotonic() - begun
    if code:
        tally.faults.append(f"the undisturbed run ended with {code}: {text[-500:]}")
        return tally
    while sum(tally.kills.values()) < kills:
        name = f"run-{tally.runs}"
        left = min(_KILLS_OF_ONE_RUN, kills - sum(tally.kills.values()))
        for _ in range(left):
            kill_once(words, place / name, seconds, draw, tally)
        code, text = ended(started(command(words, place / name), place), place)
        if code:
            tally.faults.append(f"{name} ended with {code}: {text[-800:]}")
        else:
            tally.faults += differences(place / "whole", place / name)
        tally.runs += 1
    return tally


def kill_once(
    words: tuple[str, ...], folder: Path, seconds: float, draw: random.Random, tally: Tally
) -> None:
    """Starts a run, or goes on with it, and ends it at a random moment."""
    before = last_step(folder)
    process = started(command(words, folder), folder.parent)
    if draw.random() < 0.4:
        time.sleep(draw.uniform(0.0, seconds))
    else:
        wait_for_step(folder, before + draw.randint(1, 30), process)
        time.sleep(draw.uniform(0.0, 0.05))
    others = descendants(process)
    way = draw.choice(("kill", "stop", "kill a rank") if others else ("kill", "stop"))
    if way == "kill a rank":
        number, victims = signal.SIGKILL, [draw.choice(others)]
    elif way == "stop":
        number = draw.choice(_STOPS)
        victims = [process, *others] if draw.random() < 0.7 else [process]
    else:
        number = signal.SIGKILL
        victims = [process, *others] if draw.random() < 0.5 else [process]
    draw.shuffle(victims)
    is_over = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
    label = f"{number.name} to {'all' if len(victims) > 1 or not others else 'one'}"
    tally.kills[label] = tally.kills.get(label, 0) + 1
    code, text = ended(process, folder.parent)
    wait_until_gone(others)
    if "Traceback" in text or code == 3:
        tally.faults.append(f"{label} in {folder.name} showed a trace: {text[-800:]}")
    # A run that goes on with steps that a kill has lost may be stopped before it is past them.
    elif (
        number in _STOPS
        and code == 130
        and last_step(folder) > before
        and (fault := unsaved(folder))
    ):
        tally.faults.append(f"{label} in {folder.name}: {fault}")
    elif number in _STOPS and code not in (0, 130, -number) and not is_over:
        tally.faults.append(f"{label} in {folder.name} ended with {code}: {text[-800:]}")


def command(words: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """What a user types: the same again, or `resume` once there is a run that is not finished."""
    from windlass.tracking import load_run

    if not (folder / "id").is_file():
        return ("train", *words, "--folder", folder.name)
    if load_run(folder).state == "finished":
        return ("show", folder.name, "--runs", ".")
    return ("resume", folder.name, "--runs", ".")


def unsaved(folder: Path) -> str | None:
    """What a run that was asked to stop has not saved; None if nothing."""
    done = last_step(folder)
    newest = max((path.name for path in (folder / "checkpoints").glob("step-*")), default="none")
    if done and newest != f"step-{done:08d}":
        return f"step {done} is on record, and the newest checkpoint is {newest}"
    return None


def differences(whole: Path, run: Path) -> Iterator[str]:
    """In what a run that was killed differs from the undisturbed one."""
    from windlass.tracking import load_run

    records = load_run(whole), load_run(run)
    if records[1].state != "finished" or records[1].faults:
        yield f"{run.name} is {records[1].state}: {records[1].faults}"
    first, second = (
        [(s.step, s.loss, s.gradient_norm, s.held_out_loss) for s in record.steps]
        for record in records
    )
    if first != second:
        odd = [(a, b) for a, b in zip(first, second, strict=False) if a != b][:1]
        yield f"{run.name} has other numbers: {len(first)} and {len(second)} steps, {odd}"
    files = [
        {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
        for newest in (max((folder / "checkpoints").glob("step-*")) for folder in (whole, run))
    ]
    if files[0] != files[1]:
        names = [name for name in files[0] if files[0][name] != files[1].get(name)]
        yield f"{run.name} has other weights in {names[:3]}"


def started(words: tuple[str, ...], place: Path) -> int:
    """The process of a command line, forked from this one, in which all is imported already."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.chdir(place)
        os.setpgid(0, 0)
        os.environ["OMP_NUM_THREADS"] = "1"
        output = os.open(f".{os.getpid()}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        run_words(words)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_words(words: tuple[str, ...]) -> None:
    """Runs a command line in this process."""
    import torch

    from windlass.cli.main import main as run

    torch.set_num_threads(1)
    sys.argv = ["windlass", *words]
    run()


def ended(process: int, place: Path) -> tuple[int, str]:
    """Waits for a process; its exit code or negated signal, and what it wrote."""
    end = time.monotonic() + _LONGEST_SECONDS
    while (waited := os.waitpid(process, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    output = place / f".{process}.out"
    text = output.read_text(errors="replace") if output.exists() else ""
    output.unlink(missing_ok=True)
    return os.waitstatus_to_exitcode(waited[1]), text


def wait_for_step(folder: Path, step: int, process: int) -> None:
    """Returns when a run has done a step, or has ended."""
    end = time.monotonic() + _LONGEST_SECONDS
    while last_step(folder) < step and time.monotonic() < end:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.01)


def wait_until_gone(processes: list[int]) -> None:
    """Returns when processes of an ended run are gone, which must not outlive it for long."""
    # What forks ranks may still import torch, which takes half a minute of a busy machine.
    end = time.monotonic() + 60.0
    while any(is_alive(process) for process in processes):
        if time.monotonic() > end:
            raise TimeoutError(f"{processes} are left 60 s after their parent")
        time.sleep(0.01)


def last_step(folder: Path) -> int:
    """The last step that a run has on record; 0 before the first."""
    from windlass.tracking import read_series

    losses = read_series(folder).get("loss")
    return 0 if losses is None else int(losses.steps.max(initial=0))


def descendants(process: int) -> list[int]:
    """All processes below one."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(entry.name))
    found = list(below.get(process, ()))
    for child in found:
        found += below.get(child, ())
    return found


def is_alive(process: int) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


if __name__ == "__main__":
    main()
