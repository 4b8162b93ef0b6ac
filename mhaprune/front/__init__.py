"""The user interfaces: the command line, the same from Python, and mhaprune for a model of your own."""
