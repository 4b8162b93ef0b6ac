"""Tasks that a model learns: one file each."""
