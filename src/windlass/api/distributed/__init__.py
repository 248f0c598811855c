"""Runs on several ranks: each rank's process, cluster launch scripts, recovery from lost ranks."""
