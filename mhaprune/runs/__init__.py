"""One run: its settings as a config, and what it does with them."""
