"""The measurement of this machine, kept for this user as long as the machine stays the same.

This module does not import torch, so that a kept measurement loads at once.
"""

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from windlass.atomic_files import atomic_write, seal, unseal
from windlass.errors import WindlassError
from windlass.schema import Machine
from windlass.units import parse_bytes

LOCAL_MACHINE_FILE = "here.toml"
"""File name of the measurement in the user's cache folder."""

_FORMAT = "16"
"""Version of the file. Raise it when the probe measures something new or a key changes its name, so
that older measurements are taken again."""

_GPUS = Path("/proc/driver/nvidia/gpus")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""The caches of the first core, each a folder with its `size`, such as `32768K`."""


def load_local_machine(folder: Path) -> Machine | None:
    """The kept measurement; None if it is missing, damaged, edited or from another system."""
    path = folder / LOCAL_MACHINE_FILE
    if not path.exists() or is_local_machine_changed(folder):
        return None
    try:
        machine = Machine.load(path)
    except WindlassError:
        return None
    return machine if machine.system == system_fingerprint() else None


def is_local_machine_changed(folder: Path) -> bool:
    """Whether the kept measurement differs from what was measured.

    A file without the line that seals it counts as made by hand, and is taken as it is.
    """
    path = folder / LOCAL_MACHINE_FILE
    return path.is_file() and unseal(path.read_bytes()) is None


def save_local_machine(folder: Path, machine: Machine) -> Path:
    """Writes a measurement atomically, sealed, and returns its path."""
    path = folder / LOCAL_MACHINE_FILE
    atomic_write(path, seal(machine.to_toml().encode()))
    return path


def system_fingerprint() -> str:
    """Twelve hexadecimal digits of processor, cores, memory, kernel, torch and GPUs."""
    content = "\n".join(
        (_FORMAT, processor_name(), str(core_count()), str(total_memory_bytes()),
         platform.release(), _torch_version(), *accelerator_names())
    )  # fmt: skip
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def processor_name() -> str:
    """The processor's model, as exactly as the operating system states it."""
    info = Path("/proc/cpuinfo")
    wanted = ("model name", "cpu family", "model")
    fields: dict[str, str] = {}
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in wanted:
                fields.setdefault(key.strip(), value.strip())
    return " ".join(fields.values()) or platform.processor() or platform.machine()


def core_count() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory_bytes() -> int:
    """Bytes of physical memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def last_level_cache_bytes() -> int | None:
    """Bytes of the largest cache that a core of this host uses; None if the system states none."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((parse_bytes(f"{size}iB") for size in sizes if size), default=None)


def accelerator_names() -> tuple[str, ...]:
    """Names of the GPUs that the NVIDIA driver lists."""
    if not _GPUS.is_dir():
        return ()
    return tuple(
        line.partition(":")[2].strip()
        for gpu in sorted(_GPUS.iterdir())
        for line in (gpu / "information").read_text().splitlines()
        if line.startswith("Model")
    )


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "no torch"
