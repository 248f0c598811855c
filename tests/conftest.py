"""What all tests share: `factories.py` makes tiny graphs, machines and plans."""

import sys
from pathlib import Path

from hypothesis import settings

# Tests are imported each on its own (importmode=importlib), so a module that they share must be
# found by name.
sys.path.insert(0, str(Path(__file__).parent))

# A busy machine is no fault of the code.
settings.register_profile("windlass", deadline=None)
settings.load_profile("windlass")
