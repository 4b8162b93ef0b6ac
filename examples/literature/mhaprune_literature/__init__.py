"""Published methods that our findings show to bring nothing over simpler ones, as options of mhaprune to compare
with."""
