"""Instruments. Each file is one; each returns raw traces and derives nothing."""
