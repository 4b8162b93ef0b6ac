"""Find the heads and neurons of a model."""
