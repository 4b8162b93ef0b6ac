"""One run and its settings; sweeps: the list of jobs, how each is done, and what all of them found together."""
