"""The environment of a run: code version, packages, processor; collected without torch."""

import contextlib
import hmac
import json
import os
import platform
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from windlass.atomic_files import data_folder
from windlass.schema import CodeSnapshot, Environment
from windlass.tracking.redaction import kept_variables, without_secrets

_KEY_BYTES = 32


def collect_environment(
    command: Sequence[str], code: CodeSnapshot | None = None, *, threads: int | None = None
) -> Environment:
    """The environment of this process.

    Args:
        command: the command line of this process, word by word.
        code: the code that it runs, whose commit is repeated here; None leaves that out.
        threads: compute threads; None means all that the system lets this process use.
    """
    own = code.windlass if code else None
    return Environment(
        windlass=metadata.version("windlass"),
        commit=own.commit if own else None,
        dirty=own is not None and bool(own.diff_sha256),
        python=platform.python_version(),
        packages=installed_packages(),
        system=platform.platform(),
        host=socket.gethostname(),
        processor=processor_name(),
        threads=threads or len(os.sched_getaffinity(0)),
        command=tuple(without_secrets(word) for word in command),
        variables=kept_variables(os.environ),
    )


def host_mark(run_id: str, files: Mapping[str, str]) -> str | None:
    """What only this user of this machine can say of the files of a run: an HMAC of their hashes.

    Its key lies in the user's data folder. None if that cannot be written; no run fails for it.
    """
    key = _host_key()
    if key is None:
        return None
    said = json.dumps([run_id, sorted(files.items())]).encode()
    return hmac.new(key, said, "sha256").hexdigest()


def _host_key() -> bytes | None:
    path = data_folder() / "host.key"
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, secrets.token_bytes(_KEY_BYTES))
            finally:
                os.close(file)
        key = path.read_bytes()
        return key if len(key) == _KEY_BYTES else None
    return None


def installed_packages() -> dict[str, str]:
    """Versions of all installed packages by name, sorted."""
    versions = dict(map(_name_and_version, metadata.distributions()))
    return dict(sorted((name.lower(), version) for name, version in versions.items() if name))


def _name_and_version(package: metadata.Distribution) -> tuple[str, str]:
    """Name and version of a package; empty where its files say none.

    `importlib` parses all of a package's description for each: half a second for some hundred.
    """
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    headers = text.partition("\n\n")[0]
    found = dict(_HEADER.findall(headers))
    return found.get("Name", ""), found.get("Version", "")


_HEADER = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t]*$", re.MULTILINE)
"""Source: Python packaging, core metadata specifications."""


def processor_name() -> str:
    """The processor's model name as the operating system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
