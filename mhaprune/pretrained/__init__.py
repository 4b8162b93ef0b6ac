"""Models that others made as options of the group `model`: where a model, its data and what judges it come from."""
