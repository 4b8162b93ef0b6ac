"""Heads that go for real: plans, removal and its proof, what heads cost, and the best subset there is."""
