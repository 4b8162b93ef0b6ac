"""What an experiment is given, and where its model comes from."""
