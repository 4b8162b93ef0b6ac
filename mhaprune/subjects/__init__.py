"""A model with its blocks as a `Subject`, and the user's examples."""
