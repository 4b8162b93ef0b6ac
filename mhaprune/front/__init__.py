"""The doors: the command line, and the same from Python."""
