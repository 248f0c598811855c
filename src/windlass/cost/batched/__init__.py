"""Batched cost model: step time and peak memory of many plans at once, as array formulas."""
