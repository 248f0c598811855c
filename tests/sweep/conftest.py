"""Sweeps of processes that only write a record, and so end within a second."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
