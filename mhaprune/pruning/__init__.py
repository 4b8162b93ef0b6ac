"""Removal of heads from models: plans, removal with its proof, and the best subset."""
