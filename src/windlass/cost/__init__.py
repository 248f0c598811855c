"""Cost models: predicted time of operations, collectives and whole steps, and peak memory.

`predict` gives the time and memory of one plan. `simulator` plays the programs of a plan
instruction by instruction. `clock` walks the schedule of many plans at once as arrays, for the
planner and for published runs.
"""

import lazy_loader

# The whole room and numpy load only when a name is first asked for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
