"""The input of an experiment, and the sources of models."""
