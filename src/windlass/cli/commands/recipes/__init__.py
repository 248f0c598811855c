"""`windlass recipe`: comparisons and trainings of the field."""
