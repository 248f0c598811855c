"""Descriptions of machines: a catalog of published ones, and the measurement of this one.

A machine is hosts of devices with memory tiers, rates and links. `catalog` finds one by name,
`local_machine` keeps the measurement that `probe` takes of this machine, and `number_sources` lists
each number with its source.
"""
