"""Interactions: the cost of two heads together beyond the sum of both."""
