"""Search: finds the fastest plans that fit in memory without evaluating the whole space."""
