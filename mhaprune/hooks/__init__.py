"""Hooks on any model: its blocks of heads, and ways to gate, intercept and replay their calls."""
