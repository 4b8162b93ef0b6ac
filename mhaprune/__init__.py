"""Which attention heads matter, how sure are we, and how much faster is the model without the rest."""
