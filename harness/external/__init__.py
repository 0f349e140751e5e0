"""Engines of a plan that are not joulebench's own: `[[engine]] runs = "llama.cpp"`, each with options of its own.

A new engine is one record here, and one line in `harness.external.catalog`.
"""
