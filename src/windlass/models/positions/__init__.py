"""Positions of tokens, learned or as rotations of queries and keys, and which tokens each sees."""
