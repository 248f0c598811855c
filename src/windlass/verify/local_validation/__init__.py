"""Plans drawn at random, run on this machine and held beside their predictions."""
