"""Saves and loads checkpoints: a safetensors file per layer or shard, with a checksummed manifest."""
