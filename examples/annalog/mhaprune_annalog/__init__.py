"""The model annalog as an option of mhaprune: `model=annalog`."""
