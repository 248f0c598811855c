"""Saves and loads checkpoints: one safetensors file per layer or shard, and their checksums."""
