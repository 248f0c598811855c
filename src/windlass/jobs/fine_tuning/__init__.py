"""What adapters start from: those of another software, and weights of an earlier run."""
