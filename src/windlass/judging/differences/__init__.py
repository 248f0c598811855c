"""What differs between runs, and which difference made one bad, by short re-runs."""
