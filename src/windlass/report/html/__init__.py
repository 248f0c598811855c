"""Self-contained HTML pages of plans and runs."""
