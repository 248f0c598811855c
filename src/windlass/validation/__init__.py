"""Published: predicts runs that others measured, from calibrated constants, and says how well."""
