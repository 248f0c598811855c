"""What a record must not hold: names of files that look like secrets, and values that do."""

import re
from collections.abc import Mapping

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
_SECRET_VALUE = re.compile(
    r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}|\bxox[abpr]-[\w-]{10,}"
    r"|\bhf_[A-Za-z0-9]{20,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_SECRET_ASSIGNMENT = re.compile(
    r"((?:api_?key|secret|token(?!i[sz]e)(?!s\b)|passw(?:or)?d|credential)\w*[\"']?\s*[:=]\s*"
    r"[\"'])([^\"'\s]{8,})",
    re.IGNORECASE,
)
_KEPT_VARIABLES = re.compile(
    r"(OMP|MKL|KMP|GOMP|OPENBLAS|BLIS|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|NCCL|GLOO|CUDA|CUBLAS"
    r"|CUDNN|HIP|ROCR|HSA|NVIDIA|TRITON|XLA|MALLOC|KINETO)_\w*"
    r"|GLIBC_TUNABLES|THP_MEM_ALLOC_ENABLE|LD_PRELOAD|PYTHONHASHSEED|PYTHONMALLOC|PYTHONOPTIMIZE"
)
"""Environment variables that change what a run computes or how fast; no others are kept."""


def is_secret_name(name: str) -> bool:
    """Whether a file's path looks like that of a secret, so that its content is not read."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """The text with each value that looks like a secret replaced."""
    text = _SECRET_VALUE.sub(REPLACEMENT, text)
    return _SECRET_ASSIGNMENT.sub(rf"\1{REPLACEMENT}", text)


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that a record holds, sorted, without secrets in their values."""
    names = sorted(name for name in environment if _KEPT_VARIABLES.fullmatch(name))
    return {
        name: REPLACEMENT if is_secret_name(name) else without_secrets(environment[name])
        for name in names
    }
