"""What a trained model answers: how likely it finds tasks, as a model of other tools too."""
