"""Settings: their meaning, their allowed values, and how the command line shows both."""
