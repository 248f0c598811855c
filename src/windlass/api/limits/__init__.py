"""The largest model that this machine trains, and the smallest machine that trains a model."""
