"""Verifies runs: compares them with a single device or a reference step, and injects faults."""
