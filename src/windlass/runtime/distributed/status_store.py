"""The status of every rank of a cluster, and one agreed message on which of them failed.

Kept in the store of the cluster's first host, in a process that computes nothing and outlives all
ranks and restarts. All network traffic runs in a thread: if a link silently drops packets, only
that thread blocks forever.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from windlass.runtime.distributed.heartbeat import NOT_STARTED

_CLOSE_SECONDS = 1.0
"""Time in which an exchange that is under way ends, if the link is good."""


class RankStatus(NamedTuple):
    """Progress of one rank, as the watchdog of its host reports it."""

    step: int
    instruction: int
    """Index of the current instruction in the program."""
    other_work: int
    """Count of work other than instructions: saving and evaluating."""
    stopped: bool
    """Whether a signal or a debugger has stopped the process."""
    finished: bool
    """Whether it has completed the run, or saved it as asked, and exited."""


_NO_PROGRESS = RankStatus(*NOT_STARTED, 0, stopped=False, finished=False)


class StatusStore:
    """The view that one host's watchdog has of all ranks, during one attempt."""

    def __init__(
        self,
        connect: Callable[[], Store],
        host: int,
        hosts: int,
        ranks: Sequence[int],
        *,
        interval_seconds: float,
    ) -> None:
        self._connect, self._interval_seconds = connect, interval_seconds
        self._keys, self._host = [str(index) for index in range(hosts)], host
        self.missing_hosts: tuple[int, ...] = tuple(range(hosts))
        """The hosts that have not come yet."""
        self.statuses: Mapping[int, RankStatus] = {}
        """Status by rank; empty until every host has published the status of its ranks."""
        self._last_heard: dict[int, tuple[int, float]] = {}
        self._last_answer = time.monotonic()
        self._status: Mapping[int, RankStatus] = dict.fromkeys(ranks, _NO_PROGRESS)
        self._own_message: str | None = None
        self.failure_message: str | None = None
        """What went wrong first, in the same words on all hosts; None while nothing has."""
        self.connection_error: str | None = None
        """Why the store can no longer be reached; None while it can."""
        self._all_know, self._closed = False, False
        self._wake, self._exchanged = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def publish(self, status: Mapping[int, RankStatus]) -> None:
        """Sets the status of each rank of this host, sent with the next exchange."""
        self._status = status

    def seconds_since_answer(self) -> float:
        """Time since the store last answered."""
        return time.monotonic() - self._last_answer

    def seconds_since_heard(self) -> Mapping[int, float]:
        """Time since the watchdog of each rank was last heard from; finished ranks are left out."""
        now = time.monotonic()
        return {
            rank: now - since
            for rank, (_, since) in self._last_heard.items()
            if not self.statuses[rank].finished
        }

    def finished(self) -> bool:
        """Whether all ranks of all hosts have finished."""
        return bool(self.statuses) and all(s.finished for s in self.statuses.values())

    def agree_on_failure(self, message: str, timeout_seconds: float) -> str:
        """The message that all hosts report: this one, or one that another host gave first.

        Args:
            timeout_seconds: how long to wait for the store; without an answer `message` stands.
        """
        self._own_message = message
        return self.wait_for_failure(timeout_seconds) or message

    def wait_for_failure(self, timeout_seconds: float) -> str | None:
        """The failure message of any watchdog; None if there is none within the timeout."""
        self._wait_until(lambda: self.failure_message is not None, timeout_seconds)
        return self.failure_message

    def wait_until_all_know(self, timeout_seconds: float) -> None:
        """Returns when all watchdogs have read how the attempt ended, or after the timeout."""
        self._wait_until(lambda: self._all_know, timeout_seconds)

    def exchange(self, timeout_seconds: float) -> None:
        """Returns when the last published status has been exchanged, or after the timeout."""
        start = time.monotonic()
        self._wait_until(lambda: self._last_answer > start, timeout_seconds)

    def close(self) -> None:
        """Ends the exchange, unless a dead link holds it up.

        A thread that returns from torch while Python shuts down would abort the process.
        """
        self._closed = True
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)

    def _wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> None:
        self._wake.set()
        with self._exchanged:
            self._exchanged.wait_for(
                lambda: condition() or self.connection_error is not None, timeout_seconds
            )

    def _run(self) -> None:
        try:
            self._exchange_until_closed(self._connect())
        except (dist.DistError, RuntimeError) as error:
            # Gone. The watchdog notices, unless the first host was the first to end.
            with self._exchanged:
                self.connection_error = str(error).partition("\n")[0]
                self._exchanged.notify_all()

    def _exchange_until_closed(self, store: Store) -> None:
        count, acknowledged = 0, False
        while not self._closed:
            start, count = time.monotonic(), count + 1
            ranks = [[rank, *status] for rank, status in self._status.items()]
            store.set(self._keys[self._host], json.dumps([count, ranks]))
            self._read_statuses(store)
            message = self._read_failure(store)
            if not acknowledged and (message or self.finished()):
                store.add("acknowledged", 1)
                acknowledged = True
            with self._exchanged:
                self.failure_message = message
                know_count = store.add("acknowledged", 0) if acknowledged else 0
                self._all_know = know_count >= len(self._keys)
                self._last_answer = start
                self._exchanged.notify_all()
            pause = self._interval_seconds / 10 if acknowledged else self._interval_seconds
            self._wake.wait(pause)
            self._wake.clear()

    def _read_statuses(self, store: Store) -> None:
        if self.missing_hosts:
            self.missing_hosts = tuple(
                host for host in self.missing_hosts if not store.check([self._keys[host]])
            )
            if self.missing_hosts:
                return
        now = time.monotonic()
        statuses: dict[int, RankStatus] = {}
        for text in store.multi_get(self._keys):
            count, ranks = _parse_statuses(text)
            statuses |= ranks
            for rank in ranks:
                if self._last_heard.get(rank, (None, 0.0))[0] != count:
                    self._last_heard[rank] = (count, now)
        self.statuses = {**self.statuses, **statuses}

    def _read_failure(self, store: Store) -> str | None:
        if self._own_message is not None:
            return bytes(store.compare_set("failure", "", self._own_message)).decode()
        return (
            bytes(store.get("failure")).decode(errors="replace")
            if store.check(["failure"])
            else None
        )


def _parse_statuses(text: bytes) -> tuple[int, Mapping[int, RankStatus]]:
    """The count and statuses that a host has published; none of them if they are garbage.

    A store on a network takes keys from everybody who reaches its port. A host whose status cannot
    be read counts as one that is no longer heard from.
    """
    try:
        count, ranks = json.loads(text)
        statuses = {
            int(rank): RankStatus(int(step), int(index), int(work), bool(stopped), bool(finished))
            for rank, step, index, work, stopped, finished in ranks
        }
        return int(count), statuses
    except (ValueError, TypeError):
        return 0, {}
