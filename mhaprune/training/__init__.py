"""How a network is trained: the loop and its optimisers."""
