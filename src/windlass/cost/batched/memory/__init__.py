"""Peak device memory of many plans at once, from the tensors alive at a stage's fullest moments."""
