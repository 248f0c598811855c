"""Compilation as progress: it takes minutes on a busy machine, in which no instruction ends."""

import threading

from windlass.runtime.interpreter import OTHER_WORK_SLOT, HeartbeatSlots

_SECONDS = 1.0
"""Time between two signs of life; a fraction of the shortest hang timeout in use."""
_LONGEST_SECONDS = 1800.0
"""Time after which a compilation counts as progress no more: what takes longer hangs."""


class CompileHeartbeat:
    """Counts the seconds in which torch compiles as work of this rank.

    Args:
        longest_seconds: time after which a compilation counts as progress no more.
    """

    def __init__(
        self,
        slots: HeartbeatSlots,
        *,
        seconds: float = _SECONDS,
        longest_seconds: float = _LONGEST_SECONDS,
    ) -> None:
        from torch._dynamo.callback import callback_handler

        self._slots, self._seconds, self._longest = slots, seconds, longest_seconds
        self._ended: threading.Event | None = None
        self._callbacks = callback_handler
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def close(self) -> None:
        """Counts nothing any more."""
        self._end()
        self._callbacks.remove_start_callback(self._begin)
        self._callbacks.remove_end_callback(self._end)

    def _begin(self, _: object) -> None:
        ended = self._ended = threading.Event()
        threading.Thread(target=self._count, args=(ended,), daemon=True).start()

    def _end(self, _: object = None) -> None:
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _count(self, ended: threading.Event) -> None:
        for _ in range(round(self._longest / self._seconds)):
            self._slots[OTHER_WORK_SLOT] += 1
            if ended.wait(self._seconds):
                return
