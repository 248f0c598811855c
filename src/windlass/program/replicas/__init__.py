"""What replicas share: the state of a layer, its experts, the tokens of a sequence."""
