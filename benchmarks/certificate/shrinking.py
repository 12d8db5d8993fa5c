"""Reduction of a failing composition to the simplest one that still fails."""

from __future__ import annotations

from benchmarks.certificate.case import Case, simpler
from benchmarks.certificate.comparison import Outcome
from benchmarks.certificate.processes import run_cases

TRIES = 40


def shrink(case: Case, outcome: Outcome, fault: float = 1.0, device: str = "cpu") -> tuple[Case, Outcome]:
    """Simplify a failing composition in one respect after another, as long as it fails."""
    tries = 0
    again = True
    while again and tries < TRIES:
        again = False
        for candidate in simpler(case):
            tries += 1
            _, found = next(iter(run_cases([candidate], fault, device)))
            if not found.holds:
                case, outcome, again = candidate, found, True
                break
    return case, outcome
