"""Parts of a model that are trained while the rest is frozen: chosen weights, or adapters."""
