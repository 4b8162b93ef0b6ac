"""One run and its settings; sweeps: the list of jobs, how they are done, and their combined results."""
