"""Models of transformers by its own code: built without memory, and read from their folder."""
