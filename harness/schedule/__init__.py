"""Runs that come due by themselves: when, which next, on which device, and who is told where one fails."""
