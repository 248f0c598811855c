"""Mixture of experts: a feed-forward branch of which each token takes a few parts."""
