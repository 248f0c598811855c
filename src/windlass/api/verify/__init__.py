"""Verifying plans: against one device, with injected faults, and downscaled to local processes."""
