"""Board: what the devices of all hosts are at, and one word on which of them failed.

It is kept in the store that torch's launcher met at. That lives in the launcher's own process on
one host, so that it outlives every device and every new beginning. All that goes over the network
goes in a thread: where a link swallows what is sent, only that thread waits for ever.
"""

import json
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

_MEETING = timedelta(seconds=60)
"""That the store may take to answer for the first time."""


class Post(NamedTuple):
    """What one device is at, as whoever watches it says."""

    step: int
    instruction: int
    """Its index in the program."""
    other: int
    """Of what it has done beside its instructions."""
    stopped: bool
    """By a signal or a debugger."""
    ended: bool
    """It has done all, and is gone."""


class Board:
    """What one watcher knows of all devices.

    Args:
        host: of the store.
        port: of the store.
        meeting: under what the watchers of one beginning meet; no two have the same.
        device: that is watched here.
        devices: how many there are.
        interval: seconds from one exchange to the next.
    """

    def __init__(
        self, host: str, port: int, meeting: str, device: int, devices: int, *, interval: float
    ) -> None:
        self._host, self._port, self._meeting = host, port, meeting
        self._keys = [str(at) for at in range(devices)]
        self._device, self._interval = device, interval
        self.posts: Mapping[int, Post] = {}
        """Of all devices, once all have posted."""
        self._heard: dict[int, tuple[int, float]] = {}
        self._answered = time.monotonic()
        self._own = Post(0, -1, 0, stopped=False, ended=False)
        self._mine: str | None = None
        self.word: str | None = None
        """What went wrong first, in the same words for all; None as long as nothing did."""
        self._all_know = False
        self._turn, self._told = threading.Event(), threading.Condition()
        threading.Thread(target=self._exchange, daemon=True).start()

    def post(self, own: Post) -> None:
        """Tells what the device here is at, with the next exchange."""
        self._own = own

    def unanswered_seconds(self) -> float:
        """Since the store has answered last."""
        return time.monotonic() - self._answered

    def unheard_seconds(self) -> Mapping[int, float]:
        """Since each device's watcher was heard of last; those that have ended are left out."""
        now = time.monotonic()
        return {
            at: now - since for at, (_, since) in self._heard.items() if not self.posts[at].ended
        }

    def agree(self, word: str, seconds: float) -> str:
        """What went wrong: the word given here, or the one that another watcher gave before.

        Args:
            word: which device failed, and how.
            seconds: to wait for the store; where it does not answer the word stands.
        """
        self._mine = word
        return self.told(seconds) or word

    def told(self, seconds: float) -> str | None:
        """The word of any watcher; None if none came in so many seconds."""
        self._turn.set()
        with self._told:
            self._told.wait_for(lambda: self.word is not None, seconds)
        return self.word

    def settle(self, seconds: float) -> None:
        """Returns when all watchers know the word, or when that takes longer."""
        self._turn.set()
        with self._told:
            self._told.wait_for(lambda: self._all_know, seconds)

    def flush(self, seconds: float) -> None:
        """Returns when what was posted last is there, or when that takes longer."""
        begun = time.monotonic()
        self._turn.set()
        with self._told:
            self._told.wait_for(lambda: self._answered > begun, seconds)

    def _exchange(self) -> None:
        count, knows = 0, False
        try:
            base = TCPStore(self._host, self._port, is_master=False, timeout=_MEETING)
            store = PrefixStore(f"windlass/{self._meeting}", base)
            while True:
                begun, count = time.monotonic(), count + 1
                store.set(self._keys[self._device], json.dumps([count, *self._own]))
                self._look_at_posts(store)
                word = self._read_word(store)
                if word and not knows:
                    store.add("know", 1)
                    knows = True
                with self._told:
                    self.word = word
                    self._all_know = knows and store.add("know", 0) >= len(self._keys)
                    self._answered = begun
                    self._told.notify_all()
                self._turn.wait(self._interval / 10 if knows else self._interval)
                self._turn.clear()
        except (dist.DistError, RuntimeError):
            return  # The store is gone: it answers no more, which is what the watcher sees.

    def _look_at_posts(self, store: PrefixStore) -> None:
        if not store.check(self._keys):
            return
        now = time.monotonic()
        posts: dict[int, Post] = {}
        for at, told in enumerate(store.multi_get(self._keys)):
            count, *post = json.loads(told)
            posts[at] = Post(*post)
            if self._heard.get(at, (None, 0.0))[0] != count:
                self._heard[at] = (count, now)
        self.posts = posts

    def _read_word(self, store: PrefixStore) -> str | None:
        if self._mine is not None:
            return bytes(store.compare_set("word", "", self._mine)).decode()
        return bytes(store.get("word")).decode() if store.check(["word"]) else None
