"""The functions that users call: wrap a model, score, prune, save and load."""
