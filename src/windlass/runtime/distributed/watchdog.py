"""Guard: the process beside each device of a cluster, which computes nothing and so never waits.

It starts the device, and tells all other guards what that is at. When a device dies, is stopped,
hangs, or its host is not heard of any more, they agree on one word which, where and at what, and
each ends its own device: inside gloo that could not end itself.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.atomic_files import storage_faults
from windlass.errors import DeviceLost, RunInterrupted, WindlassError
from windlass.program.device_mesh import Place
from windlass.program.instruction import Program
from windlass.runtime.distributed.failure_report import Witness, device_name, silence_words, slowest
from windlass.runtime.distributed.heartbeat import NO_BEAT, Beat
from windlass.runtime.distributed.local_launcher import Patience, Quiet, end_groups, ended
from windlass.runtime.distributed.rank_ipc import (
    STOP,
    beat_file,
    error_file,
    make_room,
    report,
    reported,
)
from windlass.runtime.distributed.status_store import Board, Post

_LOOK_SECONDS = 0.1
_AGREE_SECONDS = 3.0
"""That guards have to agree on a word, and to hear of it. Three times that and a look are less than
the ten seconds within which all is over."""
_OWN_WORD_SECONDS = 1.5
"""That others leave the guard of a silent device to tell, which has the stack of its threads."""


class Guard:
    """One device of a cluster, watched from beside it.

    Args:
        ranks: the folder in which devices tell.
        command: starts the device.
        device: its number.
        places: of all devices.
        programs: gives those of all devices; asked only when one is to be named.
        board: shared with the guards of all other devices.
        patience: with silent devices.

    Raises:
        StorageError: the folder takes no files.
    """

    def __init__(
        self,
        ranks: Path,
        command: Sequence[str],
        device: int,
        places: Sequence[Place],
        programs: Callable[[], Sequence[Program]],
        board: Board,
        patience: Patience,
    ) -> None:
        self._ranks, self._device, self._places = ranks, device, places
        self._programs, self._board, self._patience = programs, board, patience
        make_room(ranks, device)
        with storage_faults(ranks):
            beat_file(ranks, device).unlink(missing_ok=True)
            with error_file(ranks, device).open("wb") as err:
                self._process = subprocess.Popen(  # noqa: S603  our own words, no shell
                    command, stdin=subprocess.PIPE, stderr=err, process_group=0
                )
        self._beat = Beat(beat_file(ranks, device))

    def watch(self, stop: Callable[[], bool]) -> None:
        """Returns when the device has done all.

        Args:
            stop: asked all the time; True lets all devices end with the step they are in.

        Raises:
            WindlassError: a device failed; the message names it, with its place and instruction.
        """
        quiet, asked = Quiet(), False
        while (code := ended(self._process)) is None:
            if not asked and stop():
                self._ask_to_stop()
                asked = True
            self._board.post(self._post())
            if self._board.word is not None:
                raise self._lost(self._board.word)
            self._require_signs(quiet)
            time.sleep(_LOOK_SECONDS)
        if code:
            raise self._failure(code)
        self._board.post(self._post()._replace(ended=True))
        self._board.flush(_AGREE_SECONDS)

    def close(self) -> None:
        """Ends the device, with all that it has started, once all guards know why."""
        if self._board.word is not None:
            self._board.settle(_AGREE_SECONDS)
        end_groups([self._process])
        self._beat.close()

    def _post(self) -> Post:
        stopped = bool(self._witness().stopped())
        return Post(*self._beat.signs(), stopped=stopped, ended=False)

    def _witness(self, programs: Sequence[Program] = ()) -> Witness:
        return Witness(
            self._ranks, programs, self._places, {self._device: self._beat},
            {self._device: self._process},
        )  # fmt: skip

    def _ask_to_stop(self) -> None:
        pipe = self._process.stdin
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(STOP)
                pipe.flush()

    def _failure(self, code: int) -> WindlassError:
        """What the device met, or what another one met that this one only waited for."""
        found = self._witness(self._programs()).failure({self._device: code})
        if isinstance(found, RunInterrupted):
            return found
        told = reported(self._ranks, self._device)
        if told and told["follows"]:
            why = str(told["message"]).partition("\n")[0]
            gone = f"{self._name(self._device, self._beat.at())}: another device is gone ({why})"
            return self._lost(self._board.told(_AGREE_SECONDS) or gone)
        mine = str(found)
        word = self._board.agree(mine, _AGREE_SECONDS)
        return found if word == mine else self._lost(word)

    def _lost(self, word: str) -> DeviceLost:
        """The error that all guards tell alike."""
        error = DeviceLost(word, device=self._device, for_good=False)
        report(self._ranks, self._device, error)
        return error

    def _require_signs(self, quiet: Quiet) -> None:
        """Names the device that does not go on, or whose host is gone.

        Raises:
            DeviceLost: nobody goes on, or somebody is not heard of.
        """
        patience, posts = self._patience, self._board.posts
        away = self._board.unanswered_seconds()
        if away > patience.silence:
            name = self._name(self._device, self._beat.at())
            words = f"{name} does not hear of others: their store has not answered for {away:.0f} s"
            raise self._lost(f"{words}; its host, the store's, or the link between them is down")
        unheard = {at: s for at, s in self._board.unheard_seconds().items() if s > patience.silence}
        if unheard:
            at = min(unheard, key=lambda device: posts[device][:2])
            words = f"{self._name(at, posts[at][:2])} was heard of last {unheard[at]:.0f} s ago"
            raise self._agreed(at, f"{words}: its host, or the link to it, is down", stack=False)
        going = {at: post for at, post in posts.items() if not post.ended}
        seconds = quiet.seconds([post[:3] for post in posts.values()])
        stopped = [at for at, post in going.items() if post.stopped]
        begun = all(post[:2] > NO_BEAT for post in going.values())
        if not going or seconds < patience.silence:
            return
        if begun or stopped or seconds > patience.first:
            beats = {at: post[:2] for at, post in going.items()}
            at = slowest(beats, stopped, self._programs())
            words = silence_words(seconds, stopped=at in stopped)
            raise self._agreed(at, f"{self._name(at, beats[at])} {words}", stack=at not in stopped)

    def _agreed(self, device: int, word: str, *, stack: bool) -> DeviceLost:
        """The word on a silent device, which its own guard gives first if it can."""
        if device != self._device:
            return self._lost(
                self._board.told(_OWN_WORD_SECONDS) or self._board.agree(word, _AGREE_SECONDS)
            )
        if stack and ended(self._process) is None:
            word += self._witness().stack(device)
        return self._lost(self._board.agree(word, _AGREE_SECONDS))

    def _name(self, device: int, at: tuple[int, int]) -> str:
        return device_name(device, self._places[device], self._programs()[device], at)
