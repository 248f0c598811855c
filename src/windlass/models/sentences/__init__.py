"""Heads that say a class of each text or pair of texts in a row."""
