"""Recoveries of pruned models: one file each."""
