"""What tests of the sandbox share: a program that must not pass, and limits that are soon met."""

from __future__ import annotations

from workloads.sandbox import Limits, Outcome, run_program

SHORT = Limits(cpu_s=2, wall_s=20.0)
"""A busy machine gives a process a fraction of its time: the CPU limit is what ends a loop."""


def failure(program: str, limits: Limits = SHORT) -> Outcome:
    outcome = run_program(program, limits)
    assert not outcome.passed, outcome
    return outcome
