"""Prune by schedules and scores, recover the pruned models, and find how few heads are enough."""
