"""How important a head is: one file per method."""
