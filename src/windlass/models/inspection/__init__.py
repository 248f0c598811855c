"""What is found out about layers by looking at them: their kinds, and shapes on fake tensors."""
