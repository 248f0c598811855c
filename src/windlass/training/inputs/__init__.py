"""What the steps of a run take from the data."""
