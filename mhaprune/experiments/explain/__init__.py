"""What the heads of one model look at, and what breaks without them."""
