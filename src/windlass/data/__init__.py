"""Text to training batches: corpora, tokenizers, token files, and the sequences of each step.

A corpus is tokenised once and found again by the content of its files. The sequences of a step are
a function of the seed and the step alone, so there is no reader state to checkpoint.
"""
