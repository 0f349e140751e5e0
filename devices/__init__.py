"""Machines: meters, conditions, and models of hardware that is not here."""
