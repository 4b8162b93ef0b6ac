"""Things side by side: what `bench.py` times."""
