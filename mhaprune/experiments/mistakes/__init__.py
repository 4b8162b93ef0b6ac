"""Common mistakes in scoring heads, made on purpose: what each of them costs."""
