"""Tasks of real data, English words: their forms and their sounds."""
