"""Models as chains of layers: a catalogue by name, dials, and files of the user's own."""
