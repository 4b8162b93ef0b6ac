"""The project's own transformer, a module like any other, and what makes it fast."""
