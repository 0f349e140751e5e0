"""What computes a model, and what prices it."""

import os
import sys

SPIN_COUNT = "GOMP_SPINCOUNT"
"""How often a thread of torch's OpenMP (libgomp) looks for new work before it sleeps; read once, as torch is loaded."""
FEW_LOOKS = "1000"
"""Some microseconds: long enough for the barriers of llama.cpp's wheel, which shares torch's OpenMP in this process."""
IS_OURS = "JOULEBENCH_SET_SPINCOUNT"
"""Stands beside that setting where we made it, so that no process of ours takes it for the user's."""


def _let_threads_of_torch_sleep() -> None:
    """Between two products of torch our kernels compute on threads of their own, on the same cores. By default those of
    torch spin meanwhile, for milliseconds each time, and take the CPU from them: prefill took 1.3 to 2 times as
    long on two cores, and twice the CPU time (docs/decisions/0028). What a user has set stands."""
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", SPIN_COUNT} & os.environ.keys():
        os.environ |= {SPIN_COUNT: FEW_LOOKS, IS_OURS: "1"}


def environment_for_others() -> dict[str, str]:
    """What a program inherits that is not ours. Our setting of torch's threads is not for it: llama.cpp, built with
    OpenMP, decodes at a fourth of its speed when its threads sleep at each of its barriers."""
    ours = {SPIN_COUNT, IS_OURS} if IS_OURS in os.environ else set()
    return {name: value for name, value in os.environ.items() if name not in ours}


_let_threads_of_torch_sleep()
