"""Laws of step time and peak memory: one module for each type of hardware or model."""
