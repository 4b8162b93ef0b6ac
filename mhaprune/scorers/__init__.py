"""Scores of heads: one file per method."""
