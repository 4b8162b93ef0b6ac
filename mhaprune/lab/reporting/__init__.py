"""Reports: the functions that make figures, sentences and a page from tables, shared by all experiments."""
