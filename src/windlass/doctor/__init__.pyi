from .all_checks import DOCTOR_FILE, doctor, require_report_file

__all__ = [
    "DOCTOR_FILE", "doctor", "require_report_file",
]  # fmt: skip
