"""Engines: other software that runs a plan.

`torch` is PyTorch's own distributed stack, which Windlass starts itself. Which plans an engine may
get says the `can` table of the stack of the same name: the planner searches within it, and a plan
outside is refused by name before an engine is started. So an engine is given nothing that it cannot
run.

The others are never imported: a plan becomes their configuration by a file of data for each version
(`NAME/VERSION.toml`), and a configuration becomes a plan by the same file.
"""

from windlass.engines.engine_file import EngineFile, callback_text, engine_versions, load_engine
from windlass.engines.flat_plan import even_ranges, plan_facts, plan_of_facts, sayable_edits
from windlass.engines.translation import (
    ReadConfig,
    Translation,
    Unsayable,
    read_engine_config,
    translate,
)

__all__ = [
    "EngineFile",
    "ReadConfig",
    "Translation",
    "Unsayable",
    "callback_text",
    "engine_versions",
    "even_ranges",
    "load_engine",
    "plan_facts",
    "plan_of_facts",
    "read_engine_config",
    "sayable_edits",
    "translate",
]
