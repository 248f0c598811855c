"""What one command leaves for the next: outcomes of searches, and which code is compiled."""
