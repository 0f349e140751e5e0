"""A folder of runs as a history: what each run said of each cell, where a series of them changed, and what is worse."""
