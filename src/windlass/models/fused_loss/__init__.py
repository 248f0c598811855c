"""The loss fused with the projection to the vocabulary, so that the logits never exist whole."""
