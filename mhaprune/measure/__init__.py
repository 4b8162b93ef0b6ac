"""Measure loss and quality under gates, and times; and make columns of tables from them."""
