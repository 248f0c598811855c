"""One process of a world that runs plan after plan; called with its rank and the world's folder.

It reads the folder of one job a line, and answers with a line once the job is done. All that its
device sends is counted a second time, from the buffers that torch is given.
"""

import faulthandler
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.data.batches import Batches
from windlass.data.dataset_cache import prepare_dataset
from windlass.data.mlm_masking import MlmMasking
from windlass.data.token_files import TokenDataset
from windlass.models.build import build_layer_stack
from windlass.models.catalog import is_causal
from windlass.models.loss import IGNORE_INDEX
from windlass.models.tensor_parallel import collectives as exchange
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import open_checkpoint
from windlass.runtime.distributed import process_groups as world
from windlass.runtime.train import train
from windlass.runtime.verify.activation_fingerprints import ActivationFingerprints
from windlass.runtime.verify.fault_injection import inject_fault
from windlass.runtime.verify.handler_hooks import HookContext
from windlass.runtime.handler import Handlers
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.request import TrainRequest


def main() -> None:
    faulthandler.register(__import__("signal").SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, home = int(sys.argv[1]), Path(sys.argv[2])
    model = json.loads((home / "model.json").read_text())
    graph = Graph.load(home / "graph.json")
    tokens = prepare_dataset(**model["data"], cache=home / "cache")
    for line in sys.stdin:
        folder = Path(line.strip())
        try:
            one(rank, folder, model, graph, tokens)
        except Exception:  # noqa: BLE001  whatever it is, the world's owner shows it
            (folder / f"error{rank}").write_text(traceback.format_exc())
            os._exit(1)  # so that nobody waits for this rank
        sys.stdout.write("done\n")
        sys.stdout.flush()


def one(rank: int, folder: Path, model: dict, graph: Graph, tokens: TokenDataset) -> None:
    """Runs one plan's share of this rank; leaves steps, notes, checkpoints and what was sent."""
    job = json.loads((folder / "job.json").read_text())
    plan, settings = Plan.model_validate(job["plan"]), TrainRequest.model_validate(job["train"])
    several = plan.parallel.devices > 1
    if several:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank,
            world_size=plan.parallel.devices,
        )  # fmt: skip
    chain = build_layer_stack(model["name"], model["dials"], device="meta", seed=settings.seed)
    masking = None
    if not is_causal(model["name"]):
        masking = MlmMasking(
            mask_token=chain.vocabulary - 1, vocabulary=tokens.vocabulary, ignore_index=IGNORE_INDEX
        )
    batches = Batches(
        tokens, sequence=plan.batch.sequence, batch=settings.batch, seed=3, masking=masking
    )
    sent = Sent()

    def around(handlers: Handlers, inside: HookContext) -> Handlers:
        sent.pod = inside.pod
        handlers = inject_fault(job["fault"], handlers, inside) if job["fault"] else handlers
        return sent.around(ActivationFingerprints(folder, rank).wrap(handlers, inside))

    with sent.counting():
        measured = train(
            plan, chain, batches, settings, program=lower(plan, graph)[rank],
            checkpoints=folder / "checkpoints", graph=graph if several else None, around=around,
            resume=open_checkpoint(Path(job["begun"])) if job["begun"] else None,
        )  # fmt: skip
        steps = [asdict(step) | {"by_kind": dict(step.by_kind)} for step in measured]
    (folder / f"sent{rank}.json").write_text(json.dumps(sent.told(len(steps))))
    if rank == 0:
        (folder / "steps.json").write_text(json.dumps(steps))
    if several:
        dist.barrier()
        dist.destroy_process_group()


class Sent:
    """Bytes that a device sends, by the kind of the instruction that runs."""

    def __init__(self) -> None:
        self.pod: world.Pod | None = None
        self._kind: str | None = None
        self._bytes: Counter[str] = Counter()
        self._own: dict[str, int] = {}

    def around(self, handlers: Handlers) -> Handlers:
        def known(kind: str) -> Callable[[int, int], None]:
            def handler(layer: int, micro: int) -> None:
                self._kind = kind
                handlers[kind](layer, micro)
                self._kind = None
                if kind == "sync" and self.pod:
                    self._own = dict(self.pod.sent)  # what an evaluation sends is of no step

            return handler

        return {kind: known(kind) for kind in handlers}

    def counting(self) -> ExitStack:
        """Counts what torch is asked to send: of rings, as the program counts them."""
        gather, all_reduce, scatter, send = (
            exchange.all_gather, dist.all_reduce, exchange.reduce_scatter, dist.isend,
        )  # fmt: skip

        def gathered(out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None) -> None:
            ranks = dist.get_world_size(group)
            self._add((ranks - 1) * out.nbytes // ranks)
            gather(out, x, group=group)

        def scattered(out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None) -> None:
            ranks = dist.get_world_size(group)
            self._add((ranks - 1) * x.nbytes // ranks)
            scatter(out, x, group=group)

        def reduced(x: Tensor, *words: object, **more: object) -> object:
            ranks = dist.get_world_size(more.get("group"))
            self._add(2 * (ranks - 1) * x.nbytes // ranks)
            return all_reduce(x, *words, **more)

        def goes(x: Tensor, *words: object, **more: object) -> object:
            self._add(x.nbytes)
            return send(x, *words, **more)

        stack = ExitStack()
        for place, name, by in (
            (exchange, "all_gather", gathered), (exchange, "reduce_scatter", scattered),
            (world, "all_gather", gathered), (world, "reduce_scatter", scattered),
            (dist, "all_reduce", reduced), (dist, "isend", goes),
        ):  # fmt: skip
            stack.enter_context(patch.object(place, name, by))
        return stack

    def _add(self, nbytes: int) -> None:
        if self._kind not in (None, "grad_norm", "sync"):
            self._bytes[self._kind] += nbytes

    def told(self, steps: int) -> dict[str, dict[str, float]]:
        """A step's bytes, of what was counted here and by the pod itself."""
        return {
            "buffers": {kind: found / steps for kind, found in self._bytes.items()},
            "pod": {kind: found / steps for kind, found in self._own.items()},
        }


if __name__ == "__main__":
    main()
