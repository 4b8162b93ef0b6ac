"""Experiments: a folder each, with a study, figures and sentences."""
