"""Train any model: one loop for all."""
