"""Context parallelism: each of several ranks has a part of the tokens of every sequence."""
