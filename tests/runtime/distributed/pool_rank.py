"""The processes of a `RankPool`; called with a pair of file descriptors for each rank.

Torch is imported once, then the ranks are forked. A rank reads one job folder per line from its
first descriptor, and writes a line to its second once the job is done. The bytes that its rank
sends are counted a second time, from the buffers that torch is given.
"""

import faulthandler
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from forked_runs import share_imports
from power_cuts import without_power_cuts
from windlass.data.batches import Batches
from windlass.data.dataset_cache import prepare_dataset
from windlass.data.examples import ExampleBatches, load_examples
from windlass.data.keyed_choices import MlmMasking
from windlass.data.tasks.code_tasks import EncodedChoice
from windlass.data.token_files import TokenDataset
from windlass.models.build import build_layer_stack
from windlass.models.catalog import is_causal
from windlass.models.loss import IGNORE_INDEX
from windlass.models.tensor_parallel import collectives
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import open_checkpoint
from windlass.runtime.distributed import process_groups
from windlass.runtime.engine import StartEngine
from windlass.runtime.interpreter import Handlers
from windlass.runtime.rank_context import LogLikelihoods, RankContext
from windlass.runtime.rank_parts import RankParts
from windlass.runtime.train import train_loop
from windlass.runtime.verify.activation_fingerprints import ActivationFingerprints
from windlass.runtime.verify.fault_injection import inject_fault, overflow_on_last_rank
from windlass.runtime.verify.handler_hooks import HookContext
from windlass.schema import LoraRequest
from windlass.schema.data_request import DataRequest
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.train_request import TrainSettings

OVERFLOW = "overflow"
"""The job's fault that `overflow_on_last_rank` plants, in the second step."""


def main() -> None:
    faulthandler.register(__import__("signal").SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    pairs = [tuple(map(int, pair.split(","))) for pair in sys.argv[1:]]
    share_imports("torch._dynamo")  # by the first collective within a layer
    without_power_cuts()
    for rank, pair in enumerate(pairs):
        if os.fork() == 0:
            for descriptor in set(chain(*pairs)) - set(pair):
                os.close(descriptor)  # so that the pool sees the end of each process
            run_jobs(rank, *pair)
    for descriptor in chain(*pairs):
        os.close(descriptor)
    for _ in pairs:
        os.wait()


def run_jobs(rank: int, jobs: int, answers: int) -> NoReturn:
    """Runs jobs until there are no more, then ends the process."""
    with open(jobs) as lines:
        for line in lines:
            folder = Path(line.strip())
            try:
                run_job(rank, folder)
            except BaseException:  # noqa: BLE001  whatever it is, the pool shows it
                (folder / f"error{rank}").write_text(traceback.format_exc())
                os._exit(1)  # so that nobody waits for this rank
            os.write(answers, b"done\n")
    os._exit(0)


@cache
def load_model(home: Path) -> tuple[dict, Graph, TokenDataset]:
    """The model of a pool: its description, its graph and its data."""
    model = json.loads((home / "model.json").read_text())
    # A shape is a tuple, which JSON does not know.
    model["dials"] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in model["dials"].items()
    }
    tokens = prepare_dataset(DataRequest(**model["data"]), cache=home / "cache")
    return model, Graph.load(home / "graph.json"), tokens


def run_job(rank: int, folder: Path) -> None:
    """Runs this rank of a plan; leaves steps, fingerprints, checkpoints and bytes sent."""
    model, graph, tokens = load_model(folder.parent)
    job = json.loads((folder / "job.json").read_text())
    plan, settings = Plan.model_validate(job["plan"]), TrainSettings.model_validate(job["train"])
    distributed = plan.parallel.devices > 1 or plan.stack == "torch"
    if distributed:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank,
            world_size=plan.parallel.devices,
        )  # fmt: skip
    lora = None if model.get("lora") is None else LoraRequest(**model["lora"])
    stack = build_layer_stack(
        model["name"], model["dials"], device="meta", seed=settings.seed, lora=lora,
        sparsity=plan.model.sparsity if plan.model is not None else None,
    )  # fmt: skip
    masking = None
    if not is_causal(model["name"]):
        masking = MlmMasking(
            mask_token=stack.vocabulary - 1, vocabulary=tokens.vocabulary, ignore_index=IGNORE_INDEX
        )
    examples = load_examples(folder.parent / "examples.safetensors")
    batches: Batches | ExampleBatches = Batches(
        tokens, sequence=plan.batch.sequence, batch=settings.batch, seed=3, masking=masking
    )
    if examples is not None:
        batches = ExampleBatches(examples, batch=settings.batch, seed=3)
    counter = SentBytes()

    def wrap_handlers(handlers: Handlers, hook: HookContext) -> Handlers:
        if job["fault"] == OVERFLOW:
            handlers = overflow_on_last_rank(handlers, hook)
        elif job["fault"]:
            handlers = inject_fault(job["fault"], handlers, hook)
        return counter.wrap(ActivationFingerprints(folder, rank).wrap(handlers, hook))

    # torch's pipelining recognizes the functions that it is given by themselves.
    with counter.counting() if plan.stack is None else nullcontext():
        context = RankContext(
            plan=plan, stack=stack, program=lower(plan, graph)[rank], settings=settings,
            checkpoints=folder / "checkpoints", graph=graph if distributed else None,
            tasks=WordScores() if is_causal(model["name"]) else None,
        )  # fmt: skip
        measured = train_loop(
            context, batches, wrap_handlers=wrap_handlers,
            resume=open_checkpoint(Path(job["resume"])) if job["resume"] else None,
            engine=engine_of(plan),
        )  # fmt: skip
        steps = [asdict(step) | {"by_kind": dict(step.by_kind)} for step in measured]
    (folder / f"sent{rank}.json").write_text(json.dumps(counter.per_step(len(steps))))
    if rank == 0:
        (folder / "steps.json").write_text(json.dumps(steps))
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


def engine_of(plan: Plan) -> StartEngine:
    """What computes the steps of a plan."""
    if plan.stack is None:
        return RankParts
    from windlass.engines.torch import TorchEngine

    return TorchEngine


class WordScores:
    """Scores of texts that a job of a causal model is asked, the last as long as it reads."""

    def metrics(self, log_likelihoods: LogLikelihoods) -> dict[str, float]:
        """The share of right answers, and the bits of a text's bytes."""
        pairs = [(b"word1 ", b"word2"), (b"word1 ", b"2 drow"), (b"word3 word4 ", b"x")]
        pairs.append((b"w", b"ord1 word22 word1 word22 word1"))
        found = log_likelihoods([EncodedChoice(tuple(a), tuple(b)) for a, b in pairs])
        greedy = sum(one.is_greedy for one in found) / len(found)
        right = float(found[0].nats > found[1].nats)
        return {"words.acc": right, "words.greedy": greedy, "text.nats": -found[3].nats}


class SentBytes:
    """Bytes that a rank sends, by the kind of the instruction that runs."""

    def __init__(self) -> None:
        self._kind: str | None = None
        self._bytes: Counter[str] = Counter()

    def wrap(self, handlers: Handlers) -> Handlers:
        def with_kind(kind: str) -> Callable[[int, int], None]:
            def handler(layer: int, micro: int) -> None:
                self._kind = kind
                handlers[kind](layer, micro)
                self._kind = None

            return handler

        return {kind: with_kind(kind) for kind in handlers}

    def counting(self) -> ExitStack:
        """Counts what torch is asked to send; collectives as rings, like the program."""
        gather, all_reduce, scatter, send = (
            collectives.all_gather, dist.all_reduce, collectives.reduce_scatter, dist.isend,
        )  # fmt: skip

        def counted_gather(
            out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None, waits: bool = True
        ) -> object:
            ranks = dist.get_world_size(group)
            self._add((ranks - 1) * out.nbytes // ranks)
            return gather(out, x, group=group, waits=waits)

        def counted_scatter(out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None) -> None:
            ranks = dist.get_world_size(group)
            self._add((ranks - 1) * x.nbytes // ranks)
            scatter(out, x, group=group)

        def counted_reduce(x: Tensor, *args: object, **kwargs: object) -> object:
            ranks = dist.get_world_size(kwargs.get("group"))
            self._add(2 * (ranks - 1) * x.nbytes // ranks)
            return all_reduce(x, *args, **kwargs)

        def counted_send(x: Tensor, *args: object, **kwargs: object) -> object:
            self._add(x.nbytes)
            return send(x, *args, **kwargs)

        stack = ExitStack()
        for module, name, counted in (
            (collectives, "all_gather", counted_gather),
            (collectives, "reduce_scatter", counted_scatter),
            (process_groups, "all_gather", counted_gather),
            (process_groups, "reduce_scatter", counted_scatter),
            (dist, "all_reduce", counted_reduce), (dist, "isend", counted_send),
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, counted))
        return stack

    def _add(self, nbytes: int) -> None:
        if self._kind not in (None, "grad_norm", "sync"):
            self._bytes[self._kind] += nbytes

    def per_step(self, steps: int) -> dict[str, float]:
        """Bytes per step."""
        return {kind: count / steps for kind, count in self._bytes.items()}


if __name__ == "__main__":
    main()
