"""Tables and the live view of a run for a terminal."""
