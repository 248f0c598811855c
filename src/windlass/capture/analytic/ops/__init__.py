"""The operators of torch that layers call, each with its derivative, as calls of a tape."""
