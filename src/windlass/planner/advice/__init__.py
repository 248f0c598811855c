"""Advice: what is short when no plan fits, and what each change that makes one fit costs."""
