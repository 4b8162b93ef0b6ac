"""The heads of one model: what they look at, and what breaks without them."""
