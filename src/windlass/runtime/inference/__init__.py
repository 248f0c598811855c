"""What a trained model answers: text, and how likely it finds a given text."""
