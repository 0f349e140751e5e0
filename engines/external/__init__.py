"""Engines that are not joulebench's own: where they are, what they can, and their answers as ours are told."""
