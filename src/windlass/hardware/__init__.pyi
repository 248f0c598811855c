from .catalog import (
    device_names as device_names,
    host_families as host_families,
    load_machine as load_machine,
    machine_names as machine_names,
)
from .host_family import (
    HostFamily as HostFamily,
)
from .local_machine import (
    core_count as core_count,
    load_local_machine as load_local_machine,
    save_local_machine as save_local_machine,
)
from .number_sources import (
    StatedNumber as StatedNumber,
    stated_numbers as stated_numbers,
)
from .probe.disk_and_network import (
    available_memory_bytes as available_memory_bytes,
)
from .probe.probe import (
    probe_machine as probe_machine,
)
