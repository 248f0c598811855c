"""Step time of models that fit in memory: Windlass against plain loops, the best of each.

    python benchmarks/in_memory.py [--model gpt2-124m] [--rounds 5] [--only NAME ...]
        [--accumulation 1] [--trainer-python PATH]

Each contestant runs in a process of its own, and they take one step in turn, so that changes in
the speed of a shared machine affect all alike. Ratios are computed within a round. All train the
same shape on the same tokens with AdamW and clipping by the global norm:

- `windlass`: the plan that `windlass train` would run, as the planner chose it. Other words of a
  request may follow: `windlass,compile=true` pins one of its choices;
- `PRECISION-ATTENTION-CODE-PAGES`: a plain loop, see `turns/plain_loops.Rival`. The best of those
  that ran is named, and the best of those with our precision (float32 masters);
- `trainer`: the Hugging Face Trainer on its own GPT2LMHeadModel, bfloat16 autocast, fused AdamW;
  left out if its interpreter has no transformers.

`pure` loops keep no float32 weights. Their steps are faster for another result, and count apart.
The table shows how much memory of each process lies in huge pages: what starts last gets the
fewest where memory is short, so name fewer rivals (`--only`) for a large model. Measure the machine
first with `windlass probe`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from results import append_row
from turns.contestants import Contestant, Step, compare, ratios, take_turns
from turns.plain_loops import PAGES, Rival, Task, plain_loop
from turns.trainer_loop import trainer_loop
from turns.windlass_loop import windlass_loop
from windlass.atomic_files import cache_folder
from windlass.hardware.local_machine import load_local_machine

TASKS = {
    "gpt2-124m": Task("gpt2-124m", (), micro=4, sequence=512),
    **{
        f"gpt2-124m-gpu{micro}": Task("gpt2-124m", (), micro=micro, sequence=1024)
        for micro in (8, 4, 2, 1)
    },
    "gpt-tiny": Task("gpt-tiny", (), micro=16, sequence=256),
    "smoke": Task(
        "gpt-tiny", ("model.layers=2", "model.width=64", "model.heads=4"), micro=2, sequence=64
    ),
    "llama-small": Task(
        "llama-tiny",
        ("model.layers=8", "model.width=512", "model.heads=8", "model.kv_heads=4",
         "model.ffn=1408", "model.vocabulary=16384", "model.sequence=512"),
        micro=4, sequence=512,
    ),
    "bert-base": Task("bert-base", (), micro=4, sequence=512),
}  # fmt: skip
RIVALS = (
    "autocast-flash-whole-thp", "autocast-math-whole-glibc", "masters-flash-whole-glibc",
    "masters-math-whole-glibc", "masters-math-eager-glibc", "pure-math-whole-glibc",
)  # fmt: skip
"""Those that are compared if none are named: the usual fast loop, and the fastest that we found."""


def gpt2_trainer(task: Task, folder: str) -> Step:
    """The Hugging Face Trainer on its own GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = GPT2LMHeadModel(config)
    return trainer_loop(task, model, config.vocab_size, folder, rate=5e-5, bf16=True)


def contestant(name: str, python: str, task: str, accumulation: int) -> Contestant:
    """The process of a contestant.

    Args:
        name: `windlass` and words of a request, a `Rival`, or `trainer`.
        python: interpreter of the process.
        task: key of `TASKS`.
        accumulation: micro-batches in a step.
    """
    is_rival = not name.startswith("windlass") and name != "trainer"
    pages = Rival.parse(name).pages if is_rival else "thp" if name == "trainer" else "plain"
    command = [python, __file__, "--child", name, task, str(accumulation)]
    return Contestant(name, command, PAGES[pages])


def loop(name: str, task: Task, folder: str) -> Step:
    """The steps of a contestant, in its process."""
    kind, *words = name.split(",")
    if kind == "trainer":
        return gpt2_trainer(task, folder)
    if kind == "windlass":
        return windlass_loop(task, words, folder)
    return plain_loop(task, Rival.parse(name))


def has_transformers(python: str) -> bool:
    """Whether an interpreter has the Trainer and its dependencies."""
    code = "import accelerate, transformers"
    return not subprocess.run([python, "-c", code], capture_output=True, check=False).returncode


def main() -> None:
    """Prints each contestant's median step time and its ratio to Windlass, and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=TASKS, default="gpt2-124m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--trainer-python", default=sys.executable)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, task, accumulation = options.child
        # The parent kills this process, so it is the parent that removes the folder.
        replaced = TASKS[task]._replace(accumulation=int(accumulation))
        take_turns(lambda: loop(name, replaced, tempfile.gettempdir()))
        return
    asked = options.only or RIVALS
    names = [name for name in asked if name != "windlass"] + ["windlass"]
    if "trainer" in names and not has_transformers(options.trainer_python):
        print(f"trainer: transformers or accelerate is not installed for {options.trainer_python}")
        names.remove("trainer")
    if load_local_machine(cache_folder()) is None:
        sys.exit("measure this machine first: `windlass probe`")
    pythons = {"trainer": options.trainer_python}
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        contestants = [
            contestant(name, pythons.get(name, sys.executable), options.model, options.accumulation)
            for name in names
        ]
        try:
            seconds = compare(contestants, options.rounds)
            conclude(contestants, seconds, options.model, options.accumulation)
        finally:
            for each in contestants:
                each.end()


def conclude(
    contestants: list[Contestant], seconds: dict[str, list[float]], model: str, accumulation: int
) -> None:
    """Prints the table and the best rivals, and appends the rows."""
    width = max(len(each.name) for each in contestants)
    print(f"\n{'':{width}}   median  huge pages  windlass / it (median of rounds, min to max)")
    for each in contestants:
        name, times = each.name, seconds[each.name]
        median_ratio, lowest, highest = ratios(seconds["windlass"], times)
        print(
            f"{name:{width}} {statistics.median(times):7.3f}s"
            f"  {each.huge_page_bytes() / 2**20:6.0f} MiB"
            f"  {median_ratio:.3f}  ({lowest:.3f} to {highest:.3f})"
        )
        append_row(
            "in_memory_best", model=model, contestant=name, accumulation=accumulation,
            rounds=len(times), median_seconds=f"{statistics.median(times):.4f}",
            windlass_over_it=f"{median_ratio:.4f}",
            lowest=f"{lowest:.4f}", highest=f"{highest:.4f}",
        )  # fmt: skip
    rivals = {name: times for name, times in seconds.items() if not name.startswith("windlass")}
    same = {name: times for name, times in rivals.items() if not name.startswith("pure")}
    for label, group in (("best rival with float32 weights", same), ("best rival", rivals)):
        if group:
            best = min(group, key=lambda name: statistics.median(group[name]))
            print(f"{label}: {best}, ratio {ratios(seconds['windlass'], group[best])[0]:.3f}")


if __name__ == "__main__":
    main()
