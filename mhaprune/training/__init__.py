"""Training: the loop and its optimisers."""
