"""Searches for the settings with which a device spends least: which cores, how many threads."""
