"""Saves and loads checkpoints: safetensors files per layer or shard, with a checksummed manifest."""
