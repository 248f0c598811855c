"""Runs exactly a plan: interpreter, tensors, optimizer, checkpoints. Never searches or predicts."""
