"""Judges runs: expected, slow or broken, what differs between them, and why."""
