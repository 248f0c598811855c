"""Search: which plan to choose, why not another, and what would help where none fits."""
