"""Values that commands answer with: comparisons, reports and proofs of plans."""
