"""The status of every rank of a cluster, and one agreed message on which of them failed.

Kept in the store at which torch's launcher met. That store lives in the launcher's own process on
one host, so it outlives every rank and every restart. All network traffic runs in a thread: if a
link silently drops packets, only that thread blocks forever.
"""

import json
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

_CONNECT_TIMEOUT = timedelta(seconds=60)
"""How long the store may take to answer for the first time."""


class RankStatus(NamedTuple):
    """Progress of one rank, as its watchdog reports it."""

    step: int
    instruction: int
    """Index of the current instruction in the program."""
    extra_work: int
    """Count of work other than instructions: saving and evaluating."""
    stopped: bool
    """Whether a signal or a debugger has stopped the process."""
    finished: bool
    """Whether it has completed the run and exited."""


class StatusStore:
    """One watchdog's view of all ranks.

    Args:
        host: host of the store.
        port: port of the store.
        namespace: key prefix shared by the watchdogs of one attempt; unique to the attempt.
        rank: the rank that is watched here.
        world_size: number of ranks.
        interval_seconds: time between two exchanges.
    """

    def __init__(
        self,
        host: str,
        port: int,
        namespace: str,
        rank: int,
        world_size: int,
        *,
        interval_seconds: float,
    ) -> None:
        self._host, self._port, self._namespace = host, port, namespace
        self._keys = [str(rank) for rank in range(world_size)]
        self._rank, self._interval_seconds = rank, interval_seconds
        self.statuses: Mapping[int, RankStatus] = {}
        """Status by rank; empty until every rank has published one."""
        self._last_heard: dict[int, tuple[int, float]] = {}
        self._last_answer = time.monotonic()
        self._status = RankStatus(0, -1, 0, stopped=False, finished=False)
        self._own_message: str | None = None
        self.failure_message: str | None = None
        """What went wrong first, in the same words on all ranks; None while nothing has."""
        self._all_know = False
        self._wake, self._exchanged = threading.Event(), threading.Condition()
        threading.Thread(target=self._exchange, daemon=True).start()

    def publish(self, status: RankStatus) -> None:
        """Sets the status of the rank here, sent with the next exchange."""
        self._status = status

    def seconds_since_answer(self) -> float:
        """Time since the store last answered."""
        return time.monotonic() - self._last_answer

    def seconds_since_heard(self) -> Mapping[int, float]:
        """Time since each rank's watchdog was last heard from; finished ranks are left out."""
        now = time.monotonic()
        return {
            rank: now - since
            for rank, (_, since) in self._last_heard.items()
            if not self.statuses[rank].finished
        }

    def agree_on_failure(self, message: str, timeout_seconds: float) -> str:
        """The message that all ranks report: this one, or one that another rank gave first.

        Args:
            message: which rank failed, and how.
            timeout_seconds: how long to wait for the store; without an answer `message` stands.
        """
        self._own_message = message
        return self.wait_for_failure(timeout_seconds) or message

    def wait_for_failure(self, timeout_seconds: float) -> str | None:
        """The failure message of any watchdog; None if there is none within the timeout."""
        self._wake.set()
        with self._exchanged:
            self._exchanged.wait_for(lambda: self.failure_message is not None, timeout_seconds)
        return self.failure_message

    def wait_until_all_know(self, timeout_seconds: float) -> None:
        """Returns when all watchdogs have read the failure message, or after the timeout."""
        self._wake.set()
        with self._exchanged:
            self._exchanged.wait_for(lambda: self._all_know, timeout_seconds)

    def flush(self, timeout_seconds: float) -> None:
        """Returns when the last published status has reached the store, or after the timeout."""
        start = time.monotonic()
        self._wake.set()
        with self._exchanged:
            self._exchanged.wait_for(lambda: self._last_answer > start, timeout_seconds)

    def _exchange(self) -> None:
        count, acknowledged = 0, False
        try:
            base = TCPStore(self._host, self._port, is_master=False, timeout=_CONNECT_TIMEOUT)
            store = PrefixStore(f"windlass/{self._namespace}", base)
            while True:
                start, count = time.monotonic(), count + 1
                store.set(self._keys[self._rank], json.dumps([count, *self._status]))
                self._read_statuses(store)
                message = self._read_failure(store)
                if message and not acknowledged:
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
        except (dist.DistError, RuntimeError):
            return  # The store is gone. The watchdog notices that it no longer answers.

    def _read_statuses(self, store: PrefixStore) -> None:
        if not store.check(self._keys):
            return
        now = time.monotonic()
        statuses: dict[int, RankStatus] = {}
        for rank, text in enumerate(store.multi_get(self._keys)):
            count, *status = json.loads(text)
            statuses[rank] = RankStatus(*status)
            if self._last_heard.get(rank, (None, 0.0))[0] != count:
                self._last_heard[rank] = (count, now)
        self.statuses = statuses

    def _read_failure(self, store: PrefixStore) -> str | None:
        if self._own_message is not None:
            return bytes(store.compare_set("failure", "", self._own_message)).decode()
        return bytes(store.get("failure")).decode() if store.check(["failure"]) else None
