"""Step time and memory of fine-tuning: Windlass beside the Hugging Face Trainer and peft.

    python benchmarks/finetune.py [--method full lora transformers] [--rounds 7] [--only NAME ...]
        [--micro 2] [--sequence 256] [--precision float32]

All train the same small Llama from the same folder on the same tokens, with fused AdamW and
clipping by the global norm: all weights (`full`), adapters of rank 8 beside all linear layers of
the blocks (`lora`), or all weights of an OLMo 2 of the same sizes, which Windlass runs by the code
of transformers (`transformers`). Each contestant runs in a process of its own, and they take one
step in turn; ratios are computed within a round, and the peak is that of the timed steps alone.

- `windlass`: the plan that the planner picks. Further words may follow: `windlass,compile=true`;
- `ATTENTION-CODE`: the Trainer with attention by torch's kernel (`sdpa`) or written out (`eager`),
  `eager` or `compiled` code, fused AdamW, on one heap in huge pages as the fastest plain loops.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from results import append_row
from turns.contestants import Contestant, Step, compare, ratios, take_turns
from turns.plain_loops import PAGES, Task
from turns.trainer_loop import trainer_loop
from turns.windlass_loop import windlass_loop
from windlass.atomic_files import cache_folder
from windlass.hardware.local_machine import load_local_machine

RIVALS = ("sdpa-eager", "sdpa-compiled", "eager-compiled")
SHAPE = {
    "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1408, "vocab_size": 16384, "max_position_embeddings": 512,
}  # fmt: skip
RANK, ALPHA = 8, 16
RATES = {"full": 2e-5, "lora": 2e-4, "transformers": 2e-5}


def save_base(folder: Path, method: str) -> None:
    """Writes a model with random weights, which all contestants begin with."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model_type = "olmo2" if method == "transformers" else "llama"
    config = AutoConfig.for_model(model_type, **SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def trainer_steps(name: str, method: str, task: Task, folder: Path) -> Step:
    """The Trainer's steps on the base, or on adapters of peft beside it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    attention, code = name.split("-")
    model = AutoModelForCausalLM.from_pretrained(
        folder / f"base-{method}",
        attn_implementation=attention,
        dtype=torch.float32,
        use_cache=False,
    )
    if method == "lora":
        adapters = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, adapters)
    vocabulary, into = SHAPE["vocab_size"], str(folder / "trainer")
    return trainer_loop(
        task, model, vocabulary, into, rate=RATES[method], torch_compile=code == "compiled",
        bf16=task.dials == ("precision=bfloat16",),
    )  # fmt: skip


def windlass_steps(words: list[str], method: str, task: Task, folder: Path) -> Step:
    """The steps of the plan that Windlass picks."""
    adapters = [f"lora.rank={RANK}", f"lora.alpha={ALPHA}"] if method == "lora" else []
    pins = [*task.dials, f"train.learning_rate={RATES[method]}", *adapters, *words]
    own = task._replace(model=f"hf:{folder / f'base-{method}'}", dials=())
    return windlass_loop(own, pins, str(folder / "windlass"))


def conclude(
    contestants: list[Contestant], seconds: dict[str, list[float]], method: str, task: Task
) -> None:
    """Prints times, peaks and ratios, and appends the rows."""
    peaks = {each.name: each.peak_bytes() / 2**20 for each in contestants}
    print(f"\n{method:20}  median     peak  windlass / it (median of rounds, min to max)")
    for each in contestants:
        name, times = each.name, seconds[each.name]
        ratio, lowest, highest = ratios(seconds["windlass"], times)
        print(
            f"{name:20} {statistics.median(times):6.3f}s {peaks[name]:5.0f} MiB"
            f"  {ratio:.3f}  ({lowest:.3f} to {highest:.3f})"
        )
        append_row(
            "finetune", method=method, contestant=name, precision=task.dials[0].split("=")[1],
            micro=task.micro, sequence=task.sequence, rounds=len(times),
            median_seconds=f"{statistics.median(times):.4f}", peak_mebibytes=f"{peaks[name]:.0f}",
            windlass_over_it=f"{ratio:.4f}", lowest=f"{lowest:.4f}", highest=f"{highest:.4f}",
        )  # fmt: skip


def main() -> None:
    """Compares all contestants by each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--method", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=RIVALS)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    task = Task("llama", (f"precision={options.precision}",), options.micro, options.sequence)
    if options.child:
        job = json.loads(options.child)
        name, method, folder = job["name"], job["method"], Path(job["folder"])
        task = Task("llama", tuple(job["dials"]), job["micro"], job["sequence"])
        kind, *words = name.split(",")
        if kind == "windlass":
            take_turns(lambda: windlass_steps(words, method, task, folder))
        else:
            take_turns(lambda: trainer_steps(name, method, task, folder))
        return
    if load_local_machine(cache_folder()) is None:
        sys.exit("measure this machine first: `windlass probe`")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    names = [name for name in options.only if name != "windlass"] + ["windlass"]
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TMPDIR"] = temporary
        for method in options.method:
            save_base(Path(temporary) / f"base-{method}", method)
            contestants = []
            for name in names:
                job = {"name": name, "method": method, "folder": temporary, **task._asdict()}
                command = [sys.executable, __file__, "--child", json.dumps(job)]
                pages = "plain" if name.startswith("windlass") else "glibc"
                contestants.append(Contestant(name, command, PAGES[pages]))
            try:
                conclude(contestants, compare(contestants, options.rounds), method, task)
            finally:
                for each in contestants:
                    each.end()


if __name__ == "__main__":
    main()
