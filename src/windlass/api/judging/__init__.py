"""Judging runs: by their predictions, their peers and their own past; and buying a noise floor."""
