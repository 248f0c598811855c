"""Descriptions of machines: a catalog of published ones, and the measurement of this one.

A machine is hosts of devices with memory tiers, rates and links. `catalog` finds one by name,
`local_machine` keeps the measurement that `probe` takes of this machine, and `number_sources` lists
each number with its source.
"""

import lazy_loader

# Importing torch takes over a second: what needs it loads when a name is first asked for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
