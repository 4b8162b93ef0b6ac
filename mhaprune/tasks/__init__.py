"""What a model learns: one file per task."""
