"""Does `judge` tell each fault and its culprit, live, and does it leave clean runs alone?

    python benchmarks/judge.py [--runs FOLDER] [--clean 60] [--seeds 5] [--cases burner link ...]

Every run is a run of four ranks on two hosts, which are network namespaces of this machine joined
by a virtual cable; this needs root. The ranks are forked from this process, which saves the import
of torch, and are otherwise those of `windlass train`. Clean runs come first: each is judged beside
those before it, as every run is while it trains. Then each fault is run with several seeds; three
of them begin at step 41 of 100. At last clean runs are drawn from blocks of the clean ones and
judged beside the others. Runs that are in the folder already are not run again, so that the
benchmark can be done in parts; nor do clean runs count that other work on this machine disturbed.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np

import windlass.runtime  # noqa: F401  imported once, before the ranks are forked
from judge_faults import (
    BAD_SHARD,
    burn_core,
    busy_seconds,
    forked_ranks,
    hog_disk,
    make_corpora,
    network,
    slow_link,
)
from results import append_row
from windlass.api import LiveJudge, Planned, plan, train
from windlass.judge import Curve, Evidence, RankTimes, Verdict, judge
from windlass.judging.gather import gather_evidence
from windlass.judging.history import read_history
from windlass.record import annotate

STEPS, FAULT_STEP = 100, 41
DISTURBED = 0.15
"""Cores that other processes may take; a clean run that they disturb more is not clean."""
MODEL = (
    "model.layers=2", "model.width=64", "model.heads=4", "train.batch=16", "train.sequence=64",
    "batch.micro=2", f"train.steps={STEPS}", "train.evaluate_sequences=0",
    f"train.save_every={STEPS}", "precision=float32", "compile=false", "data.tokenizer=byte",
    "data.vocabulary=300", "data.held_out=0.125",
)  # fmt: skip
IN_MEMORY = (
    "parallel.pipeline=2", "parallel.data=2", "parallel.schedule=1f1b", "recompute=none",
    "sharding.parameters=1", "sharding.optimizer=1",
)  # fmt: skip
OFFLOADED = ("parallel.data=4", "phases=2")


class Case(NamedTuple):
    """One fault, and what has to be said of it."""

    plan: tuple[str, ...]
    overrides: tuple[str, ...]
    fault: "Callable[[list[int], int], Callable[[], None]] | None"
    """Starts the fault at step 41, given the ranks' processes and a seed; returns what ends it."""
    is_right: Callable[[Verdict, int], bool]
    """Whether a verdict names the fault, given the seed."""


def main() -> None:
    """Reads the command line, runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("build/judge"))
    parser.add_argument("--clean", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run later")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    options.runs.mkdir(parents=True, exist_ok=True)
    corpora = make_corpora(options.runs / "data")
    with network():
        for index in range(options.clean):
            offloaded = index % 3 == 2
            words = OFFLOADED if offloaded else IN_MEMORY
            run_once(options.runs, "clean", index, corpora[0], words, deadline=deadline)
        for seed in range(options.seeds):
            for name in options.cases:
                corpus = corpora[1] if name == "shard" else corpora[0]
                case = CASES[name]
                words = (*case.plan, *case.overrides)
                run_once(options.runs, name, seed, corpus, words, deadline=deadline)
    report(options)


def report(options: argparse.Namespace) -> None:
    """Prints what was said of the runs in the folder, and appends a row for each kind of run."""
    results = [json.loads(path.read_text()) for path in sorted(options.runs.glob("*.result.json"))]
    print(f"{'case':10} runs  right  what was said")
    for name in ("clean", *CASES):
        of_case = [result for result in results if result["case"] == name]
        if not of_case:
            continue
        if name == "clean":
            right = sum(not Verdict(**result["verdict"]).is_alarm for result in of_case)
        else:
            right = sum(
                CASES[name].is_right(Verdict(**result["verdict"]), result["seed"])
                for result in of_case
            )
        print(f"{name:10} {len(of_case):4}  {right:5}")
        for result in of_case:
            verdict = Verdict(**result["verdict"])
            if name != "clean" or verdict.is_alarm:
                print(f"{'':10}   {result['seed']:3}  {'; '.join(verdict.sentences)[:300]}")
        append_row("judge", case=name, runs=len(of_case), right=right)
    alarms = replayed_alarms(options.runs, options.replays)
    print(f"{'replayed':10} {options.replays:4}  {options.replays - alarms:5}")
    append_row("judge", case="replayed", runs=options.replays, right=options.replays - alarms)


def run_once(
    root: Path, name: str, seed: int, corpus: Path, words: tuple[str, ...], *, deadline: float
) -> None:
    """Runs one case and keeps the verdict on it, unless it was run before."""
    result = root / f"{name}-{seed:02}.result.json"
    if result.exists() or time.monotonic() > deadline:
        return
    planned = plan("gpt-tiny", *MODEL, f"data.source={corpus}", *words)
    planned = with_seed(planned, 100 * (["clean", *CASES].index(name) + 1) + seed)
    case = CASES.get(name)
    before, busy = time.monotonic(), busy_seconds()
    run = train(planned, root=root / "runs", group=name)
    live, verdict = LiveJudge(run, root / "runs"), None
    end: Callable[[], None] | None = None
    with forked_ranks(name) as pids:
        try:
            for step in run:
                if step.step == FAULT_STEP - 1 and case is not None and case.fault is not None:
                    end = case.fault(pids, seed)
                verdict = live.observe(step) or verdict
        finally:
            if end is not None:
                end()
    if verdict is None:
        raise SystemExit(f"{run.folder} was not judged")
    others = (busy_seconds() - busy) / (time.monotonic() - before)
    if name != "clean" or others > DISTURBED:
        annotate(run.folder, broken=True)
    if others > DISTURBED and name == "clean":
        print(f"{name} {seed}: others took {others:.2f} cores; to be run again", flush=True)
        return
    content = {"case": name, "seed": seed, "folder": run.folder.name}
    result.write_text(json.dumps(content | {"verdict": verdict.model_dump(mode="json")}))
    print(f"{name} {seed}: {time.monotonic() - before:.1f} s, {verdict.headline}", flush=True)


def with_seed(planned: Planned, seed: int) -> Planned:
    """The same with another seed."""
    settings = planned.request.train.model_copy(update={"seed": seed})
    return replace(planned, request=planned.request.model_copy(update={"train": settings}))


def named_rank(verdict: Verdict, seed: int) -> bool:
    """Slow, by the rank that was pinned."""
    return verdict.level == "slow" and verdict.cause == "rank" and verdict.ranks == (seed % 4,)


def named_link(verdict: Verdict, seed: int) -> bool:
    """Slow, by the link between ranks of both hosts."""
    del seed
    hosts = {rank // 2 for rank in verdict.ranks}
    return verdict.level == "slow" and verdict.cause == "link" and hosts == {0, 1}


def named_tier(verdict: Verdict, seed: int) -> bool:
    """Slow, by the disk."""
    del seed
    return verdict.level == "slow" and verdict.cause == "tier" and verdict.tier == "disk"


def named_shard(verdict: Verdict, seed: int) -> bool:
    """Broken, by the documents of one shard."""
    del seed
    return verdict.level == "broken" and any(
        f"shard{BAD_SHARD}" in name for name in verdict.documents
    )


def named_rate(verdict: Verdict, seed: int) -> bool:
    """Broken, by the learning rate."""
    del seed
    text = "learning rate is 3 times"
    return verdict.level == "broken" and any(text in sentence for sentence in verdict.sentences)


def named_sum(verdict: Verdict, seed: int) -> bool:
    """Broken, by a sum in place of a mean."""
    del seed
    text = "a sum in place of a mean"
    return verdict.level == "broken" and any(text in sentence for sentence in verdict.sentences)


CASES = {
    "burner": Case(IN_MEMORY, (), burn_core, named_rank),
    "link": Case(IN_MEMORY, (), slow_link, named_link),
    "disk": Case(OFFLOADED, (), hog_disk, named_tier),
    "shard": Case(IN_MEMORY, (), None, named_shard),
    "rate": Case(IN_MEMORY, ("train.learning_rate=0.003",), None, named_rate),
    "sum": Case(IN_MEMORY, (), None, named_sum),
}


# Clean runs that never were.


def replayed_alarms(root: Path, count: int) -> int:
    """Alarms in runs that are drawn from the clean ones, judged beside the other clean ones."""
    rng = np.random.default_rng(0)
    folders = [
        root / "runs" / json.loads(path.read_text())["folder"]
        for path in sorted(root.glob("clean-*.result.json"))
    ]
    histories = {folder: read_history(folder, root / "runs") for folder in folders}
    evidence = {folder: gather_evidence(folder, histories[folder]) for folder in folders}
    alarms = 0
    for index in range(count if folders else 0):
        folder = folders[index % len(folders)]
        drawn = replayed(rng, evidence[folder], list(evidence.values()))
        history = histories[folder]
        verdict = judge(replace(drawn, peers=history.peers, prior=history.prior))
        if verdict.is_alarm:
            alarms += 1
            print(f"{'':10}        {folder.name}: {'; '.join(verdict.sentences)[:200]}")
    return alarms


def replayed(
    rng: np.random.Generator, evidence: Evidence, runs: Sequence[Evidence], block: int = 10
) -> Evidence:
    """The same run with its blocks of 10 steps drawn again, with replacement.

    Step times are drawn from the run itself. Losses and gradient norms fall over a run, steeply at
    first, so that a block of them is another run's at the same steps.

    Args:
        rng: source of what is drawn.
        evidence: a clean run.
        runs: all clean runs.
        block: steps that are drawn together.
    """
    count = len(evidence.seconds.steps) // block
    order = np.concatenate(
        [np.arange(at * block, (at + 1) * block) for at in rng.integers(0, count, count)]
    )
    steps = evidence.seconds.steps[: len(order)]
    sources = np.repeat(rng.integers(0, len(runs), count), block)

    def drawn(name: str) -> Curve:
        rows = np.stack([run.curves[name].values[: len(steps)] for run in runs])
        return Curve(steps, rows[sources, np.arange(len(steps))])

    ranks = {
        rank: RankTimes(times.coord, steps, {k: v[order] for k, v in times.kinds.items()})
        for rank, times in evidence.ranks.items()
    }
    curves = {name: drawn(name) for name in evidence.curves}
    seconds = Curve(steps, evidence.seconds.values[order])
    return replace(evidence, seconds=seconds, ranks=ranks, curves=curves)


if __name__ == "__main__":
    main()
