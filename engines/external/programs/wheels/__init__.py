"""Scripts that another Python runs: one that has the wheel. They import that wheel and nothing of joulebench."""
