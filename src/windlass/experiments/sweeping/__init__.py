"""Sweeps: many runs that search the settings of a request, packed on one machine."""
