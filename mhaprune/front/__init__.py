"""The doors: the command line, the same from Python, and mhaprune on a model of your own."""
