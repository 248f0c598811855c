"""Runs a plan on several ranks: process groups, sharded weights, launching, and failure detection.

The collectives are those of FSDP, ZeRO and tensor parallelism; messages between pipeline stages are
point to point. Ranks of one host are processes started by `local_launcher`; ranks of a cluster are
started and watched by the `watchdog` of their host. Everything is tested with gloo on CPUs; no GPU
has run the nccl path, pipelines included.
"""
