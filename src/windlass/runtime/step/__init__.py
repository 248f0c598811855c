"""One step: what it takes from the host, holds and leaves, and how it is recorded and replayed."""
