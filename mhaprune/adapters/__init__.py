"""Models that others made, seen through the `Subject` protocol: how their heads are found, gated, captured and cut."""
