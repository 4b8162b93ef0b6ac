"""One run and its settings; and sweeps: the list of jobs, their execution and their combined results."""
