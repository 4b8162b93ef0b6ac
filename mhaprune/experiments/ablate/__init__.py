"""Remove the weakest heads by several scores: what can go, and what that brings."""
