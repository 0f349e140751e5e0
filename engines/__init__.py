"""What computes a model, and what prices it."""

import os
import sys

SPIN_COUNT = "GOMP_SPINCOUNT"
"""How often a thread of torch's OpenMP (libgomp) looks for new work before it sleeps; read once, as torch is loaded."""


def _let_threads_of_torch_sleep() -> None:
    """Between two products of torch our kernels compute on threads of their own, on the same cores. By default those of
    torch spin meanwhile, for about a millisecond each time, and take the CPU from them: prefill took 1.3 to 2 times as
    long on two cores, and twice the CPU time (docs/decisions/0028). What a user has set stands."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_COUNT, "0")


_let_threads_of_torch_sleep()
