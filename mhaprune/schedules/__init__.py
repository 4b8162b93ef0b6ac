"""Schedules: which heads go next, one file each."""
