"""Made runs of four ranks, healthy or with one fault."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
