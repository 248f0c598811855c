"""Machines: a catalogue of published ones, and the measurement of this one."""
