"""Event simulator: when each instruction of a plan's programs starts and ends on each device."""
