"""Prune by schedules and scores, recover what is left, and find how few heads are enough."""
