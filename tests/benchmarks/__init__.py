"""Benchmarks: scripts, each with a page."""

import engines  # noqa: F401 - before torch, which reads its settings of threads as it is loaded
