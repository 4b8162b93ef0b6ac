"""Settings: their meaning, their allowed values, where their options come from, and what is said of wrong ones."""
