"""Lowers a plan to one instruction list per device, and verifies the lists before they run.

The modules here say which rank does what (device mesh, pipeline schedules, ZeRO sharding, tied
weights, recompute); `lowering` writes the instruction lists, `memory` tracks every tensor's bytes
through them, and `verify` proves that they are complete, free of deadlock and fit in memory.
"""
