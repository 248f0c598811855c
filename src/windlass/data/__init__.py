"""Data: corpora, tokenizers, tokens on disk, and the batches of each step."""
