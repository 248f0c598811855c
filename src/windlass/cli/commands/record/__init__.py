"""Commands about past runs: finding, merging, judging and comparing them."""
