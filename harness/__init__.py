"""The top floor: plans, trials, runs, the command line."""
