"""Optimizers: updates by law, the learning rate, and the global gradient norm."""
