"""Which heads go next: one file per way of choosing."""
