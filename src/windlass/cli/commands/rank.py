"""`windlass rank`: one rank of a run; `windlass host`: all ranks of one host of a cluster.

Users start neither: `windlass train` starts ranks, and the script of `windlass launch` a host.
"""

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cyclopts import Parameter
from rich.text import Text

from windlass import api
from windlass.cli.commands.train import show_run
from windlass.cli.console import error_console
from windlass.errors import RequestError
from windlass.stop_signals import graceful_stop, ignore_stop_signals


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRankOptions:
    """Options of a rank whose run is on one host."""

    store: Path | None = None
    """File of the store where the ranks meet."""
    rank: int = 0
    """Index of this rank among all of the run."""
    attempt: int = 1
    """Attempt of the run, counted from 1."""
    checkpoint: Path | None = None
    """The checkpoint to start from; without one, training starts at step 1."""
    score: bool = False
    """Score what the folder asks, and train nothing."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRankOptions:
    """Options of a rank that `windlass host` has started."""

    local_rank: int | None = None
    """Index of this rank among those of its host."""
    head: str | None = None
    """Name or address of the host that keeps the store, if there are several hosts."""
    port: int | None = None
    """Port of the store there."""
    restart: int = 0
    """How often all ranks have been restarted."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class InstrumentationOptions:
    """Options of a rank whose run is verified."""

    fingerprints: bool = False
    """Record fingerprints of activations and gradients."""
    fault: str | None = None
    """Inject this fault."""
    restart_after: int | None = None
    """Stop after this step, and start again from its checkpoint."""
    overflow: bool = False
    """Let a gradient of the last rank overflow in some steps."""

    @property
    def instrumentation(self) -> api.Instrumentation | None:
        """The same as a value; None for a run that is not verified."""
        if not self.fingerprints:
            return None
        return api.Instrumentation(
            fault=self.fault, restart_after=self.restart_after, overflow=self.overflow
        )


_NO_LOCAL_RANK, _NO_CLUSTER_RANK = LocalRankOptions(), ClusterRankOptions()
_NO_INSTRUMENTATION = InstrumentationOptions()


def rank(
    folder: Path,
    *,
    local: LocalRankOptions = _NO_LOCAL_RANK,
    cluster: ClusterRankOptions = _NO_CLUSTER_RANK,
    instrumented: InstrumentationOptions = _NO_INSTRUMENTATION,
) -> None:
    """Run one rank of a run.

    Args:
        folder: The run folder.
        local: Place of the rank in the run.
        cluster: Place of a rank that `windlass host` has started.
        instrumented: What a verification records and injects.
    """
    ignore_stop_signals()  # the parent says when to stop
    if cluster.local_rank is not None:
        _cluster_rank(folder, local, cluster, cluster.local_rank)
        return
    if local.store is None:
        raise RequestError(
            "`--store` is not given: `windlass train` starts ranks, or the `launch.sh` of a run "
            "that `windlass launch` has prepared"
        )
    if local.score and local.checkpoint is not None:
        answers = api.score_rank(
            folder, store=local.store, rank=local.rank, attempt=local.attempt,
            checkpoint=local.checkpoint,
        )  # fmt: skip
        if not local.rank:
            _write_line({"likelihoods": answers})
            _write_line(None)
        return
    with api.run_rank(
        folder,
        store=local.store,
        rank=local.rank,
        attempt=local.attempt,
        checkpoint=local.checkpoint,
        instrumentation=instrumented.instrumentation,
    ) as steps:
        for step in steps:
            _write_line(asdict(step) | {"by_kind": dict(step.by_kind)})
        _write_line(None)


def rank_server(channel: int) -> None:
    """Import what ranks need, and become each of those that are asked for.

    Args:
        channel: Number of the socket on which the process that started this one asks.
    """
    from windlass.cli.main import main

    ignore_stop_signals()
    main(api.become_ranks(channel))


def _write_line(step: Mapping[str, object] | None) -> None:
    """Writes one line of JSON for the parent process; None: all steps are done and saved."""
    sys.stdout.write(json.dumps(step) + "\n")
    sys.stdout.flush()


def _cluster_rank(
    folder: Path, local: LocalRankOptions, cluster: ClusterRankOptions, local_rank: int
) -> None:
    """Runs a rank of a cluster; rank 0 shows the run."""
    place = api.ClusterRank(
        rank=local.rank, local_rank=local_rank, store=local.store, head=cluster.head,
        port=cluster.port, restart=cluster.restart,
    )  # fmt: skip
    with api.run_cluster_rank(folder, place) as steps:
        if isinstance(steps, api.Run):
            show_run(steps, steps.folder.parent)
        else:
            for _ in steps:
                pass


def host(
    folder: Path,
    *,
    nodes: int,
    per_node: int,
    node_rank: int = 0,
    head: str | None = None,
    port: int | None = None,
    restarts: int = 3,
) -> None:
    """Run the ranks of one host of a run that `windlass launch` has prepared.

    Args:
        folder: The run folder.
        nodes: Number of hosts.
        per_node: Number of ranks on each host.
        node_rank: Index of this host.
        head: Name or address of the first host, if there are several.
        port: Port of the store there.
        restarts: How often all ranks are restarted from the last checkpoint if one fails.
    """
    place = api.ClusterHost(
        nodes=nodes, node_rank=node_rank, per_node=per_node, head=head, port=port
    )

    def report(word: str, sentence: str) -> None:
        message = Text.assemble((f"{word}:", "yellow"), f" {sentence}")
        error_console.print(message, soft_wrap=True)

    with graceful_stop(signal.SIGUSR1) as stop:
        api.run_host(folder, place, restarts=restarts, stop=stop, report=report)
