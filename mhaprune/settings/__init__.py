"""Settings: their meaning, their allowed values, the sources of options, and the errors for wrong values."""
