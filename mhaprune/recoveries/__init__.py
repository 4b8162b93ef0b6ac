"""What may bring back what a removal cost: one file per way."""
