"""One step: what it takes from the host, what it holds, and what breaks it."""
