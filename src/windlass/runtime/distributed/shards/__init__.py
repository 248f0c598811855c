"""What one rank among several holds of its layers, and who holds the rest."""
