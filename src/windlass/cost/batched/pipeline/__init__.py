"""Pipeline time of many plans at once: stages simulated level by level, and delays of the step."""
