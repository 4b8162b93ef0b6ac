"""Speed without some of the heads, by size, and where the time is spent."""
