"""Training as one would write it in plain PyTorch: it shares no code with what runs a plan."""
