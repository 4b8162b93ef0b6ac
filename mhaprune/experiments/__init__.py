"""Experiments: a folder each, with study, figures and words."""
