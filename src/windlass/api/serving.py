"""`serve`: the record of runs as a page and an API."""

from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.atomic_files import read_regular_file
from windlass.errors import RequestError, StorageError
from windlass.jobs import Progress
from windlass.judging import diff, judge
from windlass.record import RUNS, Catalog

_TOKEN_BYTES, _FEWEST_CHARACTERS = 4096, 16
SERVER_HOST, SERVER_PORT = "127.0.0.1", 8321


def serve(
    root: Path | str = RUNS,
    *,
    host: str = SERVER_HOST,
    port: int = SERVER_PORT,
    token: str | None = None,
    names: Sequence[str] = (),
    ready: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Serves the runs under a folder, until it is interrupted.

    Args:
        root: the folder that holds the run folders.
        host: the address to listen on; only programs of this machine reach the default.
        port: the port; 0 takes any that is free.
        token: what a page or program must have; None makes a new one.
        names: names of this machine under which pages are opened, besides `localhost`.
        ready: called with the link of the page once the server answers.
        progress: called with how many runs are read before that.

    Raises:
        RequestError: the port is taken, the token is short, or starlette and uvicorn are missing.
        RecordError: `root` is a file.
        StorageError: the disk is full.
    """
    try:
        from windlass.server import (
            LOOPBACK_NAMES,
            Access,
            Analyses,
            RecordServer,
            link_of,
            listen,
            make_token,
            serve_app,
        )
    except ModuleNotFoundError as error:
        raise RequestError(
            f"the page needs {error.name}; install it with `pip install 'windlass[serve]'`"
        ) from None
    root = Path(root)
    if token is not None and len(token) < _FEWEST_CHARACTERS:
        raise RequestError(
            f"the token has {len(token)} characters; take {_FEWEST_CHARACTERS} or more, or none "
            "for a new one"
        )
    root.mkdir(parents=True, exist_ok=True)
    access = Access(token=token or make_token(), names=(*LOOPBACK_NAMES, *map(str.lower, names)))
    analyses = Analyses(
        diff=lambda folders: diff(*folders, root=root),
        judge=lambda folder: judge(folder, root=root),
    )
    with listen(host, port) as listening, Catalog.open(root) as catalog:
        catalog.refresh(progress)
        with RecordServer(root, catalog, access, analyses) as server:
            if ready is not None:
                ready(link_of(listening, access, names))
            serve_app(server.app, listening, access).run([listening])


def read_token(path: Path) -> str:
    """The token in a file; a new one is written to a file that is not there.

    Raises:
        RequestError: the file cannot be read.
        StorageError: it cannot be written.
    """
    from windlass.server import make_token

    try:
        return read_regular_file(path, most_bytes=_TOKEN_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        token = make_token()
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise RequestError(f"the token file `{path}` cannot be read: {reason}") from None
    try:
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(f"{token}\n")
    except OSError as error:
        raise StorageError(f"the token file `{path}` cannot be written: {error}") from None
    return token
