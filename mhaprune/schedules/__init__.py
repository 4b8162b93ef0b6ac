"""Schedules, which choose the heads to remove; one file each."""
