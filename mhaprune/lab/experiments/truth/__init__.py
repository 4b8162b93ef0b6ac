"""Every score against the best subset of heads."""
