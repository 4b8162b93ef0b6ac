"""Removal of heads from models: plans, removal with its proof, the costs of heads, and the best subset."""
