"""Make a model of a user a subject: find, prove, wrap."""

from mhaprune.moved import parts_of

__getattr__ = parts_of(__name__)
