"""Write and read models that have lost heads."""
