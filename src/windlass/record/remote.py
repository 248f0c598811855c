"""Stores of runs elsewhere: in an object store by fsspec, or on a Windlass server."""

import contextlib
import hashlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from windlass.errors import RecordError, shorten
from windlass.record.stores import RunNotCopiedError, is_record_file, require_run_id
from windlass.tracking import ID_FILE

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

_SECONDS, _BYTES_PER_SECOND = 60.0, 10_000.0
"""How long a server may take to answer, and how slowly it may send and take the rest."""
_MOST_BYTES, _MOST_TABLE_BYTES, _DIGEST_BYTES = 2**31, 2**26, 200
"""Largest answers of a server that are read: a file, a list and a hash."""
_PART_BYTES = 2**16
_CONFLICT, _TOO_LARGE = 409, 413
"""Answers of a server that takes other runs: this one is written there, or a file is too large."""


class ObjectStore:
    """Runs below a URL that fsspec opens: `s3://bucket/runs`, `gs://`, `sftp://`, `memory://`.

    Raises:
        RecordError: fsspec or its package for this protocol is missing, or the store refuses.
    """

    def __init__(self, url: str) -> None:
        self.label = without_secrets(url)
        """The URL without a password."""
        self._files, self._root = _open_url(url, self.label)
        self._folders = self._find_runs()
        self.warnings: list[str] = []

    def runs(self) -> Mapping[str, str]:
        """The name of the folder of each run, by the run's id."""
        return self._folders

    def add_run(self, run_id: str, folder: str) -> None:
        """Chooses the folder of a new run; one of another run with this name is left alone."""
        taken = folder in self._folders.values()
        self._folders[run_id] = f"{folder}-{run_id}" if taken else folder

    def files(self, run_id: str, *, checkpoints: bool = False) -> Mapping[str, int]:
        """Size in bytes of each file that belongs to the record, by name."""
        base = f"{self._root}/{self._folders[run_id]}"
        self._files.invalidate_cache(base)
        try:
            with self._reading():
                found = self._files.find(base, detail=True)
        except FileNotFoundError:
            return {}
        names = {path.partition(f"{base.lstrip('/')}/")[2]: info for path, info in found.items()}
        return {
            name: int(info["size"])
            for name, info in sorted(names.items())
            if is_record_file(name, checkpoints=checkpoints)
        }

    def read(self, run_id: str, name: str, length: int | None = None) -> bytes:
        """The content of a file, or its first `length` bytes."""
        with self._reading():
            content = self._files.cat_file(self._path(run_id, name), start=0, end=length)
        return bytes(content)

    def digest(self, run_id: str, name: str) -> str:
        """SHA-256 of the content of a file, in hexadecimal; the file is read for it."""
        with self._reading(), self._files.open(self._path(run_id, name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def write(self, run_id: str, name: str, content: bytes) -> None:
        """Puts a whole object there, or nothing.

        Raises:
            RecordError: the store refuses.
        """
        with self._writing(run_id, name) as path:
            self._files.pipe_file(path, content)

    def copy(self, run_id: str, name: str, file: Path) -> None:
        """Puts a copy of a large file there, or nothing, with a part of it in memory at most.

        Raises:
            RecordError: the store refuses.
        """
        with self._writing(run_id, name) as path:
            self._files.put_file(str(file), path)

    def is_busy(self, run_id: str) -> bool:  # noqa: ARG002  nobody trains into an object store
        """False: runs are written on disks."""
        return False

    def _path(self, run_id: str, name: str) -> str:
        return f"{self._root}/{self._folders[run_id]}/{name}"

    @contextlib.contextmanager
    def _writing(self, run_id: str, name: str) -> Iterator[str]:
        """The path of a file that is written in the block; its folder is there."""
        path = self._path(run_id, name)
        try:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            yield path
        except OSError as error:
            raise RecordError(f"`{self.label}` cannot be written: {error}") from None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns an error of the store into a sentence; a file that is not there stays one."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RecordError(f"`{self.label}` cannot be read: {error}; sync again") from None

    def _find_runs(self) -> dict[str, str]:
        folders: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self._files.ls(self._root, detail=False)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, RecordError):
                    content = self._files.cat_file(f"{path}/{ID_FILE}", start=0, end=200)
                    run_id = bytes(content).decode(errors="replace").partition("\n")[0].strip()
                    require_run_id(run_id)
                    folders[run_id] = path.rstrip("/").rpartition("/")[2]
        return folders


class ServerStore:
    """Runs on a server that `windlass serve` started.

    Args:
        url: its address, such as `https://record.example.org`.
        token: what the server asks for.

    Raises:
        RecordError: the server does not answer, or refuses the token.
    """

    def __init__(self, url: str, token: str) -> None:
        self.label = without_secrets(url)
        """The address without a password."""
        self._url, self._token = url.rstrip("/"), token
        listed = self._table("/api/sync/runs")
        self._folders = {run_id: str(folder) for run_id, folder in listed.items()}
        self.warnings: list[str] = []

    def runs(self) -> Mapping[str, str]:
        """The name of the folder of each run, by the run's id."""
        return self._folders

    def add_run(self, run_id: str, folder: str) -> None:
        """Tells under which name a new run is sent; the server chooses another if it is taken."""
        self._folders[run_id] = folder

    def files(self, run_id: str, *, checkpoints: bool = False) -> Mapping[str, int]:
        """Size in bytes of each file that belongs to the record, by name."""
        listed = self._table(f"/api/sync/runs/{run_id}")
        return {
            name: size
            for name, size in listed.items()
            if isinstance(size, int) and is_record_file(name, checkpoints=checkpoints)
        }

    def read(self, run_id: str, name: str, length: int | None = None) -> bytes:
        """The content of a file, or its first `length` bytes."""
        part = "" if length is None else f"?length={length}"
        most = _MOST_BYTES if length is None else length
        return self._ask("GET", f"{self._place(run_id, name)}{part}", most=most)

    def digest(self, run_id: str, name: str) -> str:
        """SHA-256 of the content of a file, in hexadecimal, as the server reads it."""
        answer = self._ask("GET", f"{self._place(run_id, name)}?digest=1", most=_DIGEST_BYTES)
        return answer.decode(errors="replace")

    def write(self, run_id: str, name: str, content: bytes) -> None:
        """Puts a whole file there, or nothing.

        Raises:
            RecordError: the server refuses, or does not answer.
        """
        self._ask("PUT", self._written_place(run_id, name), content)

    def copy(self, run_id: str, name: str, file: Path) -> None:
        """Puts a copy of a large file there, or nothing, with a part of it in memory at most.

        Raises:
            RecordError: the server refuses, or does not answer.
        """
        with file.open("rb") as content:
            self._ask("PUT", self._written_place(run_id, name), content)

    def is_busy(self, run_id: str) -> bool:  # noqa: ARG002  the server refuses by itself
        """False: the server itself refuses a run that is being written there."""
        return False

    def _place(self, run_id: str, name: str) -> str:
        return f"/api/sync/runs/{run_id}/files/{urllib.parse.quote(name)}"

    def _written_place(self, run_id: str, name: str) -> str:
        folder = urllib.parse.quote(self._folders[run_id], safe="")
        return f"{self._place(run_id, name)}?folder={folder}"

    def _table(self, place: str) -> dict[str, Any]:
        """A JSON object that the server answers with (`Any`: it may be any server)."""
        try:
            table = json.loads(self._ask("GET", place, most=_MOST_TABLE_BYTES))
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise RecordError(f"`{self.label}` does not answer as `windlass serve` does")
        return table

    def _ask(
        self,
        method: str,
        place: str,
        content: bytes | BinaryIO | None = None,
        *,
        most: int = _DIGEST_BYTES,
    ) -> bytes:
        """The answer to a request, of at most so many bytes."""
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/octet-stream",
        }
        sent = len(content) if isinstance(content, bytes) else 0
        if content is not None and not isinstance(content, bytes):
            sent = os.fstat(content.fileno()).st_size
            headers["Content-Length"] = str(sent)
        request = urllib.request.Request(  # noqa: S310  the scheme was checked by `open_store`
            self._url + place,
            data=content,
            method=method,
            headers=headers,
        )
        seconds = _SECONDS + sent / _BYTES_PER_SECOND
        try:
            with _answer(request, seconds) as answer:
                return self._read(answer, most)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise RecordError(
                f"`{self.label}` does not answer ({reason}); sync again when it does"
            ) from None

    def _read(self, answer: http.client.HTTPResponse, most: int) -> bytes:
        """The body of an answer, which may neither be too long nor come too slowly."""
        parts = bytearray()
        began = time.monotonic()
        while part := answer.read1(_PART_BYTES):
            parts += part
            if len(parts) > most:
                raise RecordError(f"`{self.label}` answers with more than {most} bytes")
            if time.monotonic() - began > _SECONDS + len(parts) / _BYTES_PER_SECOND:
                raise TimeoutError("it sends too slowly")
        if answer.length:
            raise http.client.IncompleteRead(bytes(parts), answer.length)
        return bytes(parts)

    def _refusal(self, error: urllib.error.HTTPError) -> RecordError:
        """What a server says that answers with an error."""
        with error:
            said = error.read1(500).decode(errors="replace").strip()
        if 300 <= error.code < 400:
            place = shorten(without_secrets(error.headers.get("Location", "")))
            said = f"it sends on to `{place}`; name that address if it may have the token"
        kind = RunNotCopiedError if error.code in (_CONFLICT, _TOO_LARGE) else RecordError
        return kind(f"`{self.label}` refuses: {said or error.reason}")


@contextlib.contextmanager
def _answer(request: urllib.request.Request, seconds: float) -> Iterator[http.client.HTTPResponse]:
    """A server's answer, of which the head is there after so many seconds.

    A socket's own limit begins anew with each byte, and a server may send one a minute.
    """
    connections = _Connections()
    opener = urllib.request.build_opener(_NoRedirects, connections)
    watch = threading.Timer(seconds, connections.shut)
    watch.daemon = True
    watch.start()
    try:
        answer = opener.open(request, timeout=_SECONDS)
    except (OSError, http.client.HTTPException):
        if not connections.was_shut:
            raise
    finally:
        watch.cancel()
    if connections.was_shut:  # which may look like the end of a head
        raise TimeoutError("it takes too long")
    with answer:
        yield answer


class _Connections(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens connections that another thread can shut."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: list[http.client.HTTPConnection] = []
        self.was_shut = False

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Opens `http://`."""
        return self.do_open(self._opening(_Connection), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Opens `https://`."""
        return self.do_open(self._opening(_SecureConnection), req)

    def shut(self) -> None:
        """Ends all connections, whatever they wait for."""
        self.was_shut = True
        for connection in self._opened:
            with contextlib.suppress(OSError, AttributeError):  # closed, or not open yet
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _opening(
        self, kind: type[http.client.HTTPConnection]
    ) -> Callable[..., http.client.HTTPConnection]:
        def opening(*words: Any, **more: Any) -> http.client.HTTPConnection:  # noqa: ANN401  urllib's
            self._opened.append(kind(*words, **more))
            return self._opened[-1]

        return opening


class _Connection(http.client.HTTPConnection):
    """Reads the answer of a server that closes before it has read a whole file."""

    def request(self, *words: Any, **more: Any) -> None:  # noqa: ANN401  http.client's own
        """Sends a request, as much as the server takes of it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().request(*words, **more)


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """The same over TLS."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves a server that sends on elsewhere: urllib would send the token there, too."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """None, so that the answer counts as an error."""


def without_secrets(url: str) -> str:
    """A URL without user, password and query, for messages."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:  # a port that is no number, or half an IPv6 address
        return f"{url.partition('://')[0]}://..."
    return urllib.parse.urlunsplit((parts.scheme, host + port, parts.path, "", ""))


def _open_url(url: str, label: str) -> "tuple[AbstractFileSystem, str]":
    try:
        import fsspec
    except ImportError:
        raise RecordError(
            f"`{label}` needs fsspec; install it with `pip install 'windlass[sync]'`"
        ) from None
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise RecordError(f"`{label}` cannot be opened: {error}") from None
    return files, root.rstrip("/")
