"""Which heads stand in for each other."""
