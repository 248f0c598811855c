"""What a record must not hold: names of files that look like secrets, and values that do."""

import os
import pwd
import re
import socket
from collections.abc import Iterator, Mapping

REPLACEMENT = "[looks like a secret]"

_SECRET_NAME = re.compile(
    r"(^|/)(\.env(\..*)?|[^/]*\.env|\.netrc|_netrc|\.npmrc|\.pypirc|\.htpasswd|\.git-credentials"
    r"|id_(rsa|dsa|ecdsa|ed25519)[^/]*|kubeconfig"
    r"|[^/]*\.(pem|key|p12|pfx|jks|keystore|kdbx|ovpn|gpg|asc|token)"
    r"|[^/]*(secret|credential|passw(or)?d)[^/]*"
    r"|([^/]*[._-])?(api)?tokens?([._-][^/]*)?(?<!\.py))$"
    r"|(^|/)(\.ssh|\.aws|\.azure|\.gnupg|\.kube|\.docker|\.gcloud)/",
    re.IGNORECASE,
)
_SECRET_BEGINNINGS = {
    "sk-": r"[\w-]{16,}", "sk_": r"\w{16,}", "pk_": r"\w{16,}", "rk_": r"\w{16,}",
    "ghp_": r"\w{20,}", "gho_": r"\w{20,}", "ghu_": r"\w{20,}", "ghs_": r"\w{20,}",
    "ghr_": r"\w{20,}", "github_pat_": r"\w{20,}", "glpat-": r"[\w-]{20,}",
    "xoxb-": r"[\w-]{10,}", "xoxp-": r"[\w-]{10,}", "xoxa-": r"[\w-]{10,}",
    "hf_": r"[A-Za-z0-9]{20,}", "AKIA": r"[0-9A-Z]{16}\b", "AIza": r"[\w-]{35}",
    "eyJ": r"[\w-]{10,}\.[\w-]{10,}\.[\w-]+",
}  # fmt: skip
"""What keys of services begin with, and what follows."""
_SECRET_VALUES = (
    # A pattern that begins with its letters is found a hundred times as fast as one with a `\b`.
    *(
        re.compile(rf"{beginning}(?<!\w{beginning}){rest}")
        for beginning, rest in _SECRET_BEGINNINGS.items()
    ),
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    ),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
)
_SECRET_WORDS = ("apikey", "api_key", "secret", "token", "passwd", "password", "credential")
_SECRET_ASSIGNMENT = re.compile(
    rf"((?:{'|'.join(_SECRET_WORDS)})(?!i[sz]e)\w*[\"']?\s*[:=]\s*[\"'])([^\"'\s]{{8,}})",
    re.IGNORECASE,
)
_KEPT_VARIABLES = re.compile(
    r"(OMP|MKL|KMP|GOMP|OPENBLAS|BLIS|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|NCCL|GLOO|CUDA|CUBLAS"
    r"|CUDNN|HIP|ROCR|HSA|NVIDIA|TRITON|XLA|MALLOC|KINETO)_\w*"
    r"|GLIBC_TUNABLES|THP_MEM_ALLOC_ENABLE|LD_PRELOAD|PYTHONHASHSEED|PYTHONMALLOC|PYTHONOPTIMIZE"
)
"""Environment variables that change what a run computes or how fast; no others are kept."""

_PATH = re.compile(r"(?<!\w)(?:~\w*|[A-Za-z]:|\.{1,2})?(?:[/\\][^\s/\\:;,'\"`()<>|]+)+[/\\]?")
"""An absolute path, one from the home folder, or one that begins with `.` or `..`."""

_SHORTEST_NAME = 2
"""Letters of a name of a user or host; a single letter names nobody."""


def is_secret_name(name: str) -> bool:
    """Whether a file's path looks like that of a secret, so that its content is not read."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """The text with each value that looks like a secret replaced."""
    for pattern in _SECRET_VALUES:
        text = pattern.sub(REPLACEMENT, text)
    return "".join(map(_without_assignments, text.splitlines(keepends=True)))


def _without_assignments(line: str) -> str:
    """The line with a replacement for a text that is given to a name such as `api_key`."""
    lower = line.lower()
    if not any(word in lower for word in _SECRET_WORDS):
        return line
    return _SECRET_ASSIGNMENT.sub(rf"\1{REPLACEMENT}", line)


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that a record holds, sorted, without secrets in their values."""
    names = sorted(name for name in environment if _KEPT_VARIABLES.fullmatch(name))
    return {
        name: REPLACEMENT if is_secret_name(name) else without_secrets(environment[name])
        for name in names
    }


def without_personal_data(text: str) -> str:
    """The text without paths, and without the names of this host and of its user.

    For files that are sent to others: an error's message may quote all of them.
    """
    text = _PATH.sub("<path>", without_secrets(text))
    for name, replacement in _personal_names():
        if len(name) < _SHORTEST_NAME:
            continue
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", replacement, text, flags=re.IGNORECASE)
    return text


def _personal_names() -> Iterator[tuple[str, str]]:
    """Names of this host and its user, each with what stands in its place."""
    host = socket.gethostname()
    yield host, "<host>"
    yield host.partition(".")[0], "<host>"
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:  # a container may run as a user without a name
        return
    yield user.pw_name, "<user>"
    for name in user.pw_gecos.replace(",", " ").split():
        yield name, "<user>"
