"""Multi-head attention from scratch, and its learnable gates."""
