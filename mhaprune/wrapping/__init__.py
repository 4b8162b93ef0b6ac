"""Make a model of a user a subject: find, prove, wrap."""
