"""Training itself: how long a model takes to learn its task, and which settings shorten this time."""
