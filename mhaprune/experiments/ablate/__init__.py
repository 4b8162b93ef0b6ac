"""Remove the weakest heads by several scores: what can be removed, and what that brings."""
