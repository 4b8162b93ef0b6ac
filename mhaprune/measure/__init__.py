"""Measure loss and quality under gates, measure times, and turn the results into columns of tables."""
