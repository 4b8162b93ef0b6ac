"""Sweeps: the list of jobs, how each is done, what is left of it, and what all of them found together."""
