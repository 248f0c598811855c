"""Positions of tokens as rotations of queries and keys, and how they scale."""
