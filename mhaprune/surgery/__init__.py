"""Remove heads from a model, and describe what is left."""
