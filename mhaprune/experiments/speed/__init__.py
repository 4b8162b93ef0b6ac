"""How much faster a model is without some of its heads, at which size, and where the time goes."""
