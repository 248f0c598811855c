"""Cost models: predicted time of operations, collectives and whole steps, and peak memory.

`predict` gives the time and memory of one plan. `simulator` plays the programs of a plan
instruction by instruction. `batched` evaluates many plans at once from closed formulas, for the
planner.
"""
