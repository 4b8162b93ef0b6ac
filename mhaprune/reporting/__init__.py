"""Tables in, figures and words and one page out: what all experiments share of it."""
