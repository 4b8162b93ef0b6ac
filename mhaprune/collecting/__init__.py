"""Run folders as they are found, and what many of them say together."""
