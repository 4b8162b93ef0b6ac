"""How sure we are, and how alike two rankings of heads are."""
