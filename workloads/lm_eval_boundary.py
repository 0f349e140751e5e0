"""Where lm-eval's code ends and ours begins: whatever it raises is a `WorkloadError` on this side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workloads.base import WorkloadError

COMPARE_ROWS = "compare its rows with those of the task's own data set, or take another task"
"""The remedy where a row is the likeliest cause."""


@contextmanager
def lm_eval_code(what: str, remedy: str) -> Iterator[None]:
    """Turns an exception of lm-eval's into a `WorkloadError`: what could not be done, its type and text, the remedy.

    The exception itself is the cause. A `WorkloadError` passes as it is: lm-eval calls models of ours, which raise it.
    """
    try:
        yield
    except WorkloadError:
        raise
    # Tasks are functions of hundreds of authors, over rows that only they know: asserts, KeyError, jinja2's and NLTK's
    # own errors, SystemExit of a module that wants a program installed. No narrower list is ever complete.
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise WorkloadError(f"{what} ({type(error).__name__}: {text:.300}); {remedy}") from error
