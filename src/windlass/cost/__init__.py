"""Cost: what a plan will take, in seconds and bytes, before it runs."""
