"""The array clock: many plans at once, or one, with the costs of the event simulator."""
