"""Recoveries of what a removal cost: one file each."""
