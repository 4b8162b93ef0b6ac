"""What may bring back what a removal cost: one file per way."""

NOTHING = "nothing"
"""What a table calls the recovery of a model that is as the removal has left it."""
