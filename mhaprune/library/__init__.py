"""mhaprune from Python, on a model of your own."""
