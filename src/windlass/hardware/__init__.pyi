from .catalog import HostFamily, device_names, host_families, load_machine, machine_names
from .local_machine import (
    LOCAL_MACHINE_FILE, accelerator_names, core_count, is_local_machine_changed,
    last_level_cache_bytes, load_local_machine, save_local_machine,
)  # fmt: skip
from .machine_draft import machine_text, new_machine
from .machine_questions import Question, answer_faults, name_fault, next_question
from .machine_check import StatedNumber, stated_numbers
from .probe.disk_and_network import CpuContention, available_memory_bytes
from .probe.machine_parts import measure_parts
from .probe.probe import probe_machine
from .user_machines import (
    load_user_machine, machine_of_report, save_user_machine, user_machine_names,
)  # fmt: skip

__all__ = [
    "LOCAL_MACHINE_FILE", "CpuContention", "HostFamily", "Question", "StatedNumber",
    "accelerator_names", "answer_faults", "available_memory_bytes", "core_count", "device_names",
    "host_families", "is_local_machine_changed", "last_level_cache_bytes", "load_local_machine",
    "load_machine", "load_user_machine", "machine_names", "machine_of_report", "machine_text",
    "measure_parts", "name_fault", "new_machine", "next_question", "probe_machine",
    "save_local_machine", "save_user_machine", "stated_numbers", "user_machine_names",
]  # fmt: skip
