"""How jobs are done: each in a process of its own, a sweep that goes on, what is left of it."""
