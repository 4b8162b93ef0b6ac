"""The user interfaces: the command line, its commands from Python, and mhaprune for a model of your own."""
