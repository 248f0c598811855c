"""What is kept of each weight beside it: moments and averages."""
