from .catalog import (
    device_names,
    host_families,
    load_machine,
    machine_names,
)
from .host_family import (
    HostFamily,
)
from .local_machine import (
    core_count,
    load_local_machine,
    save_local_machine,
)
from .number_sources import (
    StatedNumber,
    stated_numbers,
)
from .probe.disk_and_network import (
    available_memory_bytes,
)
from .probe.probe import (
    probe_machine,
)

__all__ = [
    "HostFamily",
    "StatedNumber",
    "available_memory_bytes",
    "core_count",
    "device_names",
    "host_families",
    "load_local_machine",
    "load_machine",
    "machine_names",
    "probe_machine",
    "save_local_machine",
    "stated_numbers",
]
