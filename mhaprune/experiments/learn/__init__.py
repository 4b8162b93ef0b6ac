"""Training itself: how long a model takes to learn its task, and what makes it shorter."""
